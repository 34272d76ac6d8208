"""Log lines: text and JSON, with ids, without floods."""

import json
import logging

import pytest

from headrace.service import logs
from headrace.service.logs import MAX_REPEATS, REPEAT_S, RepeatFilter

logger = logging.getLogger("headrace.demo")


@pytest.fixture
def said(capsys):
    """Gives the lines logged to stderr so far; afterwards logging is as before."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)

    def lines():
        return capsys.readouterr().err.splitlines()

    yield lines
    root.handlers[:], root.level = before


def test_a_json_line_has_the_message_the_service_and_the_request(said):
    logs.setup("router", "info", "json")
    token = logs.request_id.set("r-1")
    logger.warning("lost %s\nat %d", "it", 3)
    logs.request_id.reset(token)
    logger.info("hello", extra={"request_id": "r-2"})
    first, second = map(json.loads, said())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "service": "router",
        "logger": "headrace.demo",
        "message": "lost it\nat 3",
        "request_id": "r-1",
    }
    assert second["request_id"] == "r-2"


def test_an_exception_stays_on_the_json_line(said):
    logs.setup("router", "info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("it failed")
    (line,) = said()
    assert "ValueError: no" in json.loads(line)["exception"]


def test_a_line_of_text_names_the_request_where_there_is_one(said):
    logs.setup("router", "info", "text")
    logger.info("one")
    logger.info("two", extra={"request_id": "r-2"})
    logger.debug("not this")
    one, two = said()
    assert one.endswith(" INFO router one")
    assert two.endswith(" INFO router two request_id=r-2")


def test_repeats_are_left_out_and_counted():
    now = 0.0
    repeats = RepeatFilter(lambda: now)

    def passes(message):
        record = logging.makeLogRecord({"name": "a", "levelno": 30, "msg": message})
        return record.num_left_out if repeats.filter(record) else None

    assert [passes("x %s") for _ in range(MAX_REPEATS + 5)] == [0] * MAX_REPEATS + [None] * 5
    assert passes("other") == 0
    now = REPEAT_S
    assert [passes("x %s"), passes("x %s")] == [5, 0]


def test_messages_made_of_data_take_no_memory():
    repeats = RepeatFilter()
    for number in range(5000):
        record = logging.makeLogRecord({"name": "a", "levelno": 30, "msg": f"m {number}"})
        assert repeats.filter(record)
    assert len(repeats._seen) <= 1000
