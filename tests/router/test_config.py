"""Settings to rules: tenants by name come from the file, the rest from anywhere."""

import pytest

from headrace.service.config import ConfigError, load
from router.config import (
    RecoveryConfig,
    RouterConfig,
    StreamsConfig,
    TenantConfig,
    TenantsConfig,
    rules_of,
)
from router.core.pauses import UnreadLimits


def rules_from(file, text):
    file.write_text(text)
    sections = (
        *(("router", RouterConfig), ("streams", StreamsConfig)),
        ("recovery", RecoveryConfig),
        *(("tenant", TenantConfig), ("tenants", TenantsConfig)),
    )
    return rules_of(*(load(struct, section=name, file=file) for name, struct in sections))


def test_tenants_with_limits_of_their_own_are_named_in_the_file(tmp_path):
    rules = rules_from(
        tmp_path / "a.toml",
        """
        [router]
        policy = "priority"
        max_live_requests = 7
        [tenant]
        requests_per_minute = 30
        [tenants.named.acme]
        weight = 2.5
        max_queued_tokens = 9
        """,
    )
    assert (rules.policy, rules.limits.max_live_requests) == ("priority", 7)
    assert rules.tenant_limits.requests_per_minute == 30
    assert rules.limits_by_tenant["acme"].weight == 2.5
    assert rules.limits_by_tenant["acme"].max_queued_tokens == 9
    assert rules.limits_by_tenant["acme"].requests_per_minute == 0


def test_a_slow_client_is_paused_unless_it_is_to_be_cut(tmp_path):
    assert rules_from(tmp_path / "a.toml", "").unread == UnreadLimits()
    text = '[streams]\nslow_client = "cut"\nmax_unread_tokens = 9\nmax_pause_s = 2'
    expected = UnreadLimits(slow_client="cut", max_unread_tokens=9, max_pause_s=2.0)
    assert rules_from(tmp_path / "b.toml", text).unread == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.named.acme]\nwait = 2", "wait"),
        ("[tenants.named.acme]\nweight = 0", "> 0.0 - at .*weight"),
        ("[tenant]\nweight = -1", "weight.*Expected `float` > 0.0"),
        ('[streams]\nslow_client = "wait"', "slow_client"),
    ],
)
def test_a_wrong_setting_of_a_tenant_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        rules_from(tmp_path / "a.toml", text)
