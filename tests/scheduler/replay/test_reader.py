"""Recordings that anybody may have made: read within bounds, refused in words that say where."""

import copy
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import tarfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scheduler.core.plan import SchedulerConfig
from scheduler.replay.command import replay
from scheduler.replay.reader import read_traces
from scheduler.replay.recorder import Recorder
from scheduler.replay.replay import first_difference
from scheduler.replay.schema import decode_head, decode_step
from scheduler.replay.trace import TraceRecord, header, trace_config
from tests.scheduler.core.building import Driver, new_request, scheduler_config
from tests.scheduler.replay.test_replay import TRACE_BY_NAME

MAX_RSS_BYTES = 400 << 20


def recording(*, skip_steps: int = 0, **config: Any) -> list[TraceRecord]:
    """A recording's records; one that begins in the middle of a run if steps are skipped."""
    records: list[TraceRecord] = []
    recorder = Recorder(scheduler_config(num_gpu_blocks=9, **config), records.append)
    driver = Driver(recorder)
    head = recorder.header("run")
    driver.add(*(new_request(key, 20 + key, max_tokens=9) for key in range(5)))
    driver.steps(skip_steps)
    if skip_steps:
        head = recorder.header("run")
        records.clear()
    driver.add(new_request(9, 4, deadline=99.0))
    driver.steps(2)
    recorder.pause_request(1)
    driver.steps(2)
    recorder.abort(2)
    recorder.continue_request(1)
    driver.run()
    recorder.end_step()
    return [head, *records]


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(path: Path, *options: str) -> str:
    """What the command says; it must end as it does for any file."""
    result = CliRunner().invoke(replay, [*options, str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {0, 1}
    return result.output


@pytest.mark.parametrize("skip_steps", [0, 4])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_a_recording_is_read_step_by_step(tmp_path, skip_steps, pack):
    records = recording(skip_steps=skip_steps)
    path = tmp_path / "run.jsonl"
    path.write_bytes(pack(written(path, records).read_bytes()))
    [(name, trace)] = read_traces(path)
    assert name == "run.jsonl"
    assert first_difference(trace) is None
    assert [step["i"] for step in trace["steps"]] == [record["i"] for record in records[1:]]
    assert trace["steps"].where == f"line {len(records)}"
    assert "recorded" in run(path, "--set", "max_num_seqs=2")


def test_every_setting_of_a_core_is_in_a_trace():
    config = scheduler_config()
    for field in fields(SchedulerConfig):
        value = getattr(config, field.name)
        match value:
            case bool():
                other: object = not value
            case int() | float():
                other = 0.25 if isinstance(value, float) else value + 1
            case "fcfs":
                other = "priority"
            case None:
                other = "ngram"
        changed = replace(config, **{field.name: other})
        data = json.dumps(header(changed, "run"))
        assert trace_config(decode_head(data)) == changed, field.name


@pytest.mark.parametrize("depth", [1, 2])
def test_reading_keeps_all_that_a_recorder_writes(depth):
    records = recording(
        skip_steps=4,
        pipeline_depth=depth,
        long_prefill_token_threshold=8,
        long_prefill_share=0.5,
        num_spec_tokens=2,
        spec_kind="ngram",
    )
    head = records[0]
    assert as_json(decode_head(json.dumps(head))["start"]) == as_json(head["start"])
    for record in records[1:]:
        for request in record.get("requests", {}).values():
            del request["arrival"]  # nothing reads it
        assert as_json(decode_step(json.dumps(record))) == as_json(record)


def as_json(value: object) -> object:
    return json.loads(json.dumps(value))


def with_config(**values: object) -> TraceRecord:
    head = copy.deepcopy(recording()[0])
    head["config"] |= values
    return head


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_gpu_blocks": 10**10}, "num_gpu_blocks"),
        ({"num_gpu_blocks": -1}, "num_gpu_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"max_num_seqs": 10**9}, "max_num_seqs"),
        ({"max_model_len": 2**40}, "max_model_len"),
        ({"num_spec_tokens": 10**6}, "num_spec_tokens"),
        ({"watermark": 1e308}, "watermark"),
        ({"watermark": float("nan")}, "line 1"),
        ({"policy": None}, "policy"),
        ({"policy": [[[]]]}, "policy"),
    ],
)
def test_settings_that_no_core_can_have_are_refused_by_name(tmp_path, config, named):
    records = [with_config(**config), *recording()[1:]]
    output = run(written(tmp_path / "run.jsonl", records))
    assert "is no trace" in output
    assert named in output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda step: step.pop("state"), "`state`"),
        (lambda step: step.update(i="three"), "$.i"),
        (lambda step: step.update(add=["nobody"]), "nobody"),
        (lambda step: step.update(abort=["nobody"]), "nobody"),
        (lambda step: step["update"].update(of=77), "77"),
        (lambda step: step["update"]["sampled"].update(r0=[2**40]), "sampled"),
        (lambda step: step["update"]["sampled"].update(r0=[1] * 10_000), "line 5"),
        (lambda step: step.update(ctl=[["pause", "WHATEVER"]]), "WHATEVER"),
        (lambda step: step.update(ctl=[[]]), "line 5"),
        (lambda step: step.update(client=[["pause"]]), "line 5"),
    ],
)
def test_a_step_that_makes_no_sense_is_named_by_its_line(tmp_path, change, said):
    records = copy.deepcopy(recording())
    change(records[4])
    output = run(written(tmp_path / "run.jsonl", records))
    assert "line 5" in output
    assert said in output


@pytest.mark.parametrize(
    "line", [b"[" * 200_000, b'{"i": ' + b'{"a":' * 200_000, b"NaN", b"\xff\xfe", b"[]", b"0", b""]
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    records = recording()
    path = written(tmp_path / "run.jsonl", records)
    lines = path.read_bytes().splitlines()
    for number in (1, 4):
        path.write_bytes(b"\n".join([*lines[: number - 1], line, *lines[number:]]))
        output = run(path)
        assert "Error" in output
        assert number == 1 or f"line {number}" in output


def test_a_whole_trace_names_its_step(tmp_path):
    trace = copy.deepcopy(TRACE_BY_NAME["w01_budget512"])
    trace["steps"][2]["update"]["sampled"] = {"r0": ["token"]}
    path = tmp_path / "trace.json"
    for indent in (None, 2):
        path.write_text(json.dumps(trace, indent=indent))
        assert "step 2: ValidationError: Expected `int`, got `str`" in run(path)


def bomb(folder: Path, kind: str) -> Path:
    """A small file that unpacks to 512 MiB."""
    path = folder / "bomb"
    zeros = bytes(1 << 20)
    if kind == "gz":
        with gzip.open(path, "wb") as file:
            for _ in range(512):
                file.write(zeros)
        return path
    head = tarfile.TarInfo("run.jsonl")
    head.size = 512 << 20
    if kind == "tar.xz with a long header":
        head.type = tarfile.GNUTYPE_LONGNAME
    with lzma.open(path, "wb", preset=0) as file:
        if "tar" in kind:
            file.write(head.tobuf())
        for _ in range(512):
            file.write(zeros)
    return path


REPLAY_WITHIN = r"""
import re, sys
from scheduler.replay.command import replay
try:
    replay([sys.argv[1]])
finally:
    # Not ru_maxrss, which a child inherits from whoever started it.
    print("rss", re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.parametrize("kind", ["gz", "xz", "tar.xz", "tar.xz with a long header"])
def test_a_small_file_that_unpacks_to_much_costs_little(tmp_path, kind):
    path = bomb(tmp_path, kind)
    assert path.stat().st_size < 4 << 20
    done = subprocess.run(
        [sys.executable, "-c", REPLAY_WITHIN, path],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert int(done.stdout.split()[1]) * 1024 < MAX_RSS_BYTES


def test_an_xz_that_wants_a_vast_dictionary_is_refused(tmp_path):
    path = tmp_path / "run.jsonl.xz"
    vast = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    path.write_bytes(lzma.compress(b"{}\n", filters=vast))
    assert "emory" in run(path)


@pytest.mark.parametrize("number", [3, 60])
def test_a_file_that_is_cut_off_is_refused(tmp_path, number):
    path = written(tmp_path / "run.jsonl", recording())
    packed = lzma.compress(path.read_bytes())
    path.write_bytes(packed[: len(packed) - number])
    assert "Error" in run(path)


def test_an_archive_of_other_things_is_refused(tmp_path):
    path = tmp_path / "traces.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        other = tarfile.TarInfo("other.json")
        other.size = 3
        archive.addfile(other, io.BytesIO(b"{}\n"))
    output = run(path)
    assert "other.json is no trace" in output


HOSTILE = [
    *(0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308),
    *(None, True, False, "", "r0", "x" * 1000, [], {}, [[]], [None], {"r0": 0}, [-1], ["r0"] * 99),
]


def mutate(rng: random.Random, value: Any) -> Any:
    """`value` with something in it replaced, dropped, doubled or moved."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return rng.choice(HOSTILE)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: mutate(rng, value[key])}
    index = rng.randrange(len(value))
    if rng.random() < 0.15:
        return value[:index] + value[index + 1 :]
    if rng.random() < 0.15:
        return [*value[:index], value[index], *value[index:]]
    return [*value[:index], mutate(rng, value[index]), *value[index + 1 :]]


@pytest.mark.parametrize("seed", range(8))
def test_no_mutation_of_a_recording_is_more_than_an_error(tmp_path, seed):
    rng = random.Random(seed)
    config = {"pipeline_depth": 1 + seed % 2, "enable_prefix_caching": seed % 3 > 0}
    path = tmp_path / "run.jsonl"
    for skip_steps in (0, 4):
        records = recording(skip_steps=skip_steps, **config)
        for _ in range(40):
            mutated = list(records)
            for _ in range(rng.randrange(1, 3)):
                index = rng.choice([0, rng.randrange(len(records))])
                mutated[index] = mutate(rng, mutated[index])
            written(path, mutated)
            run(path)
            run(path, "--set", "max_num_batched_tokens=7")


def test_no_bytes_of_a_recording_are_more_than_an_error(tmp_path):
    rng = random.Random(3)
    path = tmp_path / "run.jsonl"
    data = written(path, recording(skip_steps=4)).read_bytes()
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        run(path)
