"""All services, the real model and the real store, used by the command as a user does."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.headrace.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]

HEADRACE = [sys.executable, "-m", "headrace"]
MODEL = "smollm2-135m-instruct"


def headrace(*arguments, server=None, **options):
    where = ["--server", server] if server else []
    pipes = {"capture_output": True, "text": True, "timeout": 240}
    return subprocess.run([*HEADRACE, *arguments, *where], check=False, **(pipes | options))


def start(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*HEADRACE, *arguments], **(pipes | options))


def until(condition, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def receiver():
    receiver = OtlpReceiver()
    yield receiver
    receiver.stop()


def start_serving(*arguments, **options):
    """Process and address of a Headrace with a small KV pool, once a model answers."""
    process = start(
        *("serve", "--num-kv-blocks", "64", "--max-model-len", "512", *arguments), **options
    )
    said = ""
    while "Ctrl-C stops it" not in said:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        said += line
    process.console_url = re.search(r"Console: (\S+)", said)[1]
    return process, re.search(r"Serving \S+ at (\S+)", said)[1]


@pytest.fixture(scope="module")
def serving(model_path, receiver):
    """Process and address of a Headrace; afterwards, nothing of it is left."""
    process, address = start_serving(
        *("--port", "0", "--otlp-endpoint", receiver.endpoint),
        env=os.environ | {"OTEL_BSP_SCHEDULE_DELAY": "100", "HEADRACE_RECOVERY_ORPHAN_TTL_S": "15"},
    )
    # A full pipe would stop the process.
    log = io.StringIO()
    reading = threading.Thread(target=lambda: log.writelines(process.stderr))
    reading.start()
    yield process, address
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.wait(timeout=60)
    reading.join()
    process.stdout.close()
    process.stderr.close()
    errors = log.getvalue()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not [child for child in children if child.is_running()]


@pytest.fixture(scope="module")
def server(serving):
    return serving[1]


def test_a_prompt_is_completed(server):
    done = headrace(
        *("generate", "The capital of France is", "--temperature", "0", "--max-tokens", "2"),
        server=server,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " Paris.\n", "")


def test_the_console_is_there_and_shows_the_steps_of_a_request(serving):
    process, server = serving
    url = process.console_url
    with urllib.request.urlopen(url) as answer:
        assert b"<title>Headrace console</title>" in answer.read()
    headrace(*("generate", "Once", "--request-id", "seen", "--max-tokens", "3"), server=server)
    asked = urllib.request.Request(
        f"{url}/api/steps",
        data=json.dumps({"history_s": 600}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        fields = json.loads(answer.readline())["fields"]
        while not (workers := json.loads(answer.readline())):
            pass
    name, steps = (
        workers[0]["worker_id"],
        [dict(zip(fields, s, strict=True)) for s in workers[0]["steps"]],
    )
    seen = []
    for step in steps[-30:]:  # of other tests, too
        batch = f"{url}/api/batch?worker_id={name}&position={step['position']}"
        with urllib.request.urlopen(batch) as answer:
            rows = {row["request_id"]: row["num_tokens"] for row in json.load(answer)["rows"]}
        uses = ("prefill_tokens", "decode_tokens", "speculative_tokens")
        assert sum(rows.values()) == sum(step[use] for use in uses)
        seen.append("seen" in rows)
    assert sum(seen) == 3


def test_a_bad_word_does_not_come_out(server):
    done = headrace(
        *("generate", "The capital of France is", "--temperature", "0", "--max-tokens", "2"),
        *("--bad-word", "Paris", "--bad-word", "the"),
        server=server,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Paris" not in done.stdout


def test_several_completions_come_together(server):
    done = headrace("generate", "Hello", "-n", "2", "--max-tokens", "2", "--json", server=server)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)["outputs"]
    assert [len(output["token_ids"]) for output in outputs] == [2, 2]


def test_status_and_explain_tell_how_a_request_ended(server):
    name = f"told-{os.getpid()}"
    options = ("--max-tokens", "2", "--request-id", name)
    assert headrace("generate", "Hello", *options, server=server).returncode == 0

    def state():
        record = headrace("status", name, "--json", server=server)
        return record.returncode == 0 and json.loads(record.stdout)

    record = until(lambda: (r := state()) and r["state"] == "LENGTH_CAPPED" and r)
    assert (record["model"], record["completion_tokens"]) == (MODEL, 2)
    kinds = json.loads(headrace("explain", name, "--json", server=server).stdout)["events"]
    assert [kinds[0]["kind"], kinds[-1]["kind"]] == ["ADDED", "FINISHED"]


def test_an_answer_can_be_read_again_from_any_token(server):
    name = f"again-{os.getpid()}"
    options = ("--max-tokens", "12", "--temperature", "0", "--request-id", name)
    answer = headrace("generate", "Once upon a time", *options, server=server).stdout
    assert until(lambda: headrace("resume", name, server=server).stdout) == answer
    later = headrace("resume", name, "--from-token", "5", "--json", server=server)
    (output,) = json.loads(later.stdout)["outputs"]
    assert len(output["token_ids"]) == 7
    assert answer.removesuffix("\n").endswith(output["text"])
    record = json.loads(headrace("status", name, "--json", server=server).stdout)
    assert (record["router_id"], record["worker_id"]) == ("router-0", "worker-0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_client_that_leaves_frees_its_blocks(server, number):
    process = start("generate", "Once upon a time", "--max-tokens", "400", "--server", server)
    assert process.stdout.read(1)
    process.send_signal(number)
    process.communicate(timeout=30)

    def load():
        pool = json.loads(headrace("pool", "--json", server=server).stdout)
        worker = pool["workers"][0]
        is_free = worker["num_free_kv_blocks"] == worker["num_kv_blocks"]
        return worker["num_running"] == pool["num_in_flight"] == 0 and is_free

    until(load)


def test_every_kv_block_has_one_owner_while_a_request_runs(server):
    process = start("generate", "Once upon a time", "--max-tokens", "400", "--server", server)
    assert process.stdout.read(1)
    audit = headrace("pool", "audit", "--json", server=server)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    (worker,) = json.loads(audit.stdout)
    assert worker["num_requests"] == worker["num_compared_rows"] == 1
    parts = ("num_free_blocks", "num_cached_blocks", "num_owned_blocks")
    assert sum(worker[part] for part in parts) == worker["num_kv_blocks"]


def service(serving, name):
    """The process of a service, once it is a new one after an earlier kill."""
    children = psutil.Process(serving[0].pid).children()
    return next(c for c in children if any(Path(word).name == name for word in c.cmdline()))


@pytest.mark.parametrize("name", ["gpuworker", "scheduler", "router", "valkey-server"])
def test_an_answer_goes_on_when_a_service_is_killed_in_its_middle(serving, name):
    prompt = ("generate", "Once upon a time", "--temperature", "0", "--max-tokens", "60")
    undisturbed = headrace(*prompt, server=serving[1])
    assert undisturbed.returncode == 0, undisturbed.stderr
    process = start(*prompt, "--server", serving[1])
    begun = process.stdout.read(20)
    killed = service(serving, name)
    killed.kill()
    answer = begun + process.stdout.read()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, answer) == (0, undisturbed.stdout), errors
    until(lambda: service(serving, name).pid != killed.pid)
    until(lambda: console_answers(serving[0].console_url))


def console_answers(url):
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def test_an_answer_goes_on_when_everything_is_killed_and_started_again(
    model_path, tmp_path, unused_tcp_port
):
    where = ("--port", str(unused_tcp_port))
    options = {"env": os.environ | {"XDG_STATE_HOME": str(tmp_path)}, "stderr": subprocess.DEVNULL}
    serve, address = start_serving(*where, **options)
    try:
        prompt = ("generate", "Once upon a time", "--temperature", "0", "--max-tokens", "60")
        undisturbed = headrace(*prompt, server=address)
        client = start(*prompt, "--server", address)
        begun = client.stdout.read(20)
        serve.kill()
        serve.communicate()
        serve, _ = start_serving(*where, **options)
        answer = begun + client.stdout.read()
        _, errors = client.communicate(timeout=60)
        assert (client.returncode, answer) == (0, undisturbed.stdout), errors
        assert "(resumed after" in errors
    finally:
        serve.terminate()
        serve.communicate(timeout=60)


def test_a_request_that_can_never_fit_is_refused_and_says_why(server):
    done = headrace("generate", "word " * 2000, server=server)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


# The spans of a request that nothing disturbs: service and name, under the one above.
TREE = {
    ("cli", "headrace.v1.Inference/Generate"): None,
    ("router", "headrace.v1.Inference/Generate"): ("cli", "headrace.v1.Inference/Generate"),
    ("router", f"chat {MODEL}"): ("router", "headrace.v1.Inference/Generate"),
    ("router", "admission"): ("router", f"chat {MODEL}"),
    ("router", "tokenize"): ("router", "admission"),
    **{
        ("router", stage): ("router", f"chat {MODEL}")
        for stage in ("queue", "prefill", "decode", "detokenize")
    },
    ("scheduler", "schedule"): ("router", f"chat {MODEL}"),
    ("scheduler", "wait"): ("scheduler", "schedule"),
    ("scheduler", "residency"): ("scheduler", "schedule"),
    ("scheduler", "step"): ("scheduler", "residency"),
    ("gpuworker", "gpuworker step"): ("scheduler", "step"),
}


def test_one_trace_from_the_command_to_the_workers_step_or_none_at_all(server, receiver):
    names = {"1": f"traced-{os.getpid()}", "0": f"untraced-{os.getpid()}"}
    # The request that is not sampled comes first: what it exports would come first, too.
    for share in ("0", "1"):
        environment = os.environ | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_TRACES_SAMPLER": "traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": share,
        }
        prompt = ("generate", "--chat", "Hi", "--max-tokens", "2", "--request-id", names[share])
        assert headrace(*prompt, server=server, env=environment).returncode == 0

    def found():
        """Of each span of the trace, the span above; once there are enough."""
        spans = list(receiver.spans)
        mine = [s for s in spans if s.attributes.get("gen_ai.response.id") == names["1"]]
        trace = [s for s in spans if mine and s.trace_id == mine[0].trace_id]
        by_id = {s.span_id: (s.service.removeprefix("headrace-"), s.name) for s in trace}
        tree = {by_id[s.span_id]: by_id.get(s.parent_id) for s in trace}
        return (tree, trace) if len(trace) >= len(TREE) else None

    tree, trace = until(found)
    assert tree == TREE
    assert len(trace) == len(TREE)
    assert {span.status for span in trace} == {0}
    root = next(span for span in trace if not span.parent_id)
    # Nothing begins before its parent, but for clocks that are read in another order.
    assert all(span.begin_unix_ns >= root.begin_unix_ns - 10**7 for span in trace)
    ids = {span.attributes.get("gen_ai.response.id") for span in receiver.spans}
    assert names["1"] in ids
    assert names["0"] not in ids
    # Steps of the other request would be under no span that came.
    every = {span.span_id for span in receiver.spans}
    assert all(s.parent_id in every for s in receiver.spans if s.service == "headrace-gpuworker")


def test_the_demo_answers_and_leaves_nothing(model_path, tmp_path):
    ours = {"TEST_OF": str(tmp_path)}
    demo = ("demo", "--prompt", "Why is the sky blue?", "--max-tokens", "4")
    done = headrace(*demo, env=os.environ | ours)
    assert done.returncode == 0, done.stderr
    question, answer, figures = done.stdout.strip().split("\n\n")
    assert question == "> Why is the sky blue?"
    assert answer
    assert re.fullmatch(r"4 tokens in .* TTFT .* TPOT .* tokens/s", figures)
    assert not [p for p in psutil.process_iter() if ours.items() <= _environment(p).items()]


def _environment(process):
    try:
        return process.environ()
    except psutil.Error:
        return {}
