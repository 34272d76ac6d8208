"""The control plane of these tests is a real one."""

import kubernetes
import pytest

from tests.kubernetes.control_plane import ControlPlane


def test_a_service_account_may_do_nothing_that_no_role_allows(control_plane: ControlPlane):
    namespace = control_plane.new_namespace()
    token = control_plane.service_account(namespace, "nobody")
    with (
        control_plane.client(token) as client,
        pytest.raises(kubernetes.client.ApiException) as refused,
    ):
        kubernetes.client.CoreV1Api(client).list_namespaced_pod(namespace)
    assert refused.value.status == 403
