"""Encodes what scripts take, and decodes what they answer."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from headrace.status.records import (
    Record,
    Stored,
    StoredCompletion,
    Tokens,
    Update,
    Verdict,
    WriteOutcome,
    parse_name,
)
from headrace.status.states import State

_UPDATE_FIELDS = tuple(
    f.name
    for f in fields(Update)
    if f.name not in {"request_id", "state", "epoch", "time_unix_s", "spec"}
)
_encode = msgspec.msgpack.Encoder().encode


def encode_writes(
    chains: Sequence[Sequence[Tokens | Update]], writer: str, owner: tuple[str, str]
) -> list[bytes]:
    """The write script's arguments for items, by completion.

    owner is the process that appends tokens: its name and its incarnation.
    """
    arguments = [b""]
    items = [
        [
            _update(item, writer, arguments)
            if isinstance(item, Update)
            else _tokens(item, owner, arguments)
            for item in chain
        ]
        for chain in chains
    ]
    arguments[0] = _encode(items)
    return arguments


def _update(update: Update, writer: str, arguments: list[bytes]) -> tuple[Any, ...]:
    """Numbers are formatted as the record stores them."""
    values = ["update_time_unix_s", str(update.time_unix_s)]
    for name in _UPDATE_FIELDS:
        if (value := getattr(update, name)) is not None:
            values += [name, str(value)]
    if update.scheduler_id is not None:
        # Within an epoch, no other scheduler may write. A router does not know which incarnation
        # takes the request.
        values += ["scheduler_epoch", str(update.epoch)]
        if update.scheduler_incarnation is None:
            values += ["scheduler_incarnation", ""]
    if update.spec:
        arguments.append(update.spec)
    return (
        parse_name(update.request_id)[1],
        update.state,
        update.epoch,
        _text(update.create_time_unix_s),
        _text(getattr(update, f"{writer}_id")),
        _text(getattr(update, f"{writer}_incarnation")),
        update.num_completions or 0,
        len(arguments) if update.spec else 0,
        values,
    )


def _tokens(tokens: Tokens, owner: tuple[str, str], arguments: list[bytes]) -> tuple[Any, ...]:
    arguments.append(tokens.token_ids)
    first = len(arguments)
    arguments += tokens.logprobs
    arguments += tokens.prompt_logprobs
    return (
        parse_name(tokens.request_id)[1],
        "",
        tokens.epoch,
        _text(tokens.create_time_unix_s),
        *owner,
        tokens.position,
        first,
        len(tokens.logprobs),
        len(tokens.prompt_logprobs),
    )


def encode_claim(
    stored: Stored, state: State, values: Mapping[str, object], *, is_recovery: bool
) -> bytes:
    """A claim that succeeds while the request is as in `stored`."""
    expected = [
        (c.record.epoch, str(c.record.create_time_unix_s), not c.record.state.is_final)
        for c in stored.completions
    ]
    pairs = [str(part) for pair in values.items() for part in pair]
    return _encode((state, pairs, is_recovery, expected))


def decode_outcome(note: Sequence[Any]) -> WriteOutcome:
    """A note of the write script on an item: verdict, epoch, state, number of tokens."""
    verdict, epoch, state, num_tokens = note
    name = verdict.decode()
    return WriteOutcome(
        # OLDER: the id is used again by a newer request.
        Verdict.STALE if name == "OLDER" else Verdict(name),
        State(state.decode()) if state else None,
        epoch,
        num_tokens,
        is_superseded=name == "STALE",
    )


def decode_record(name: str, found: Mapping[bytes, bytes]) -> Record | None:
    """Parses a record's hash; fields of later versions are ignored. None: there is no record."""
    if not found:
        return None
    values = {field.decode(): value.decode() for field, value in found.items()}
    values.setdefault("create_time_unix_s", values["update_time_unix_s"])
    known = {
        field.name: _PARSERS.get(field.name, str)(values[field.name])
        for field in fields(Record)
        if field.name in values
    }
    return Record(request_id=name, **known)


def decode_records(request_id: str, completions: Sequence[Sequence[Any]]) -> list[Record]:
    """The records of a request's completions, in order; [] for an unknown request.

    A completion without a record, or with one of an earlier request of this id, is given a record
    of epoch 0 in state QUEUED.
    """
    names = [f"{request_id}#{k}" for k in range(len(completions))]
    if len(completions) == 1:
        names = [request_id]
    first = decode_record(names[0], _pairs(completions[0][0]))
    if first is None:
        return []
    records = [first]
    for name, completion in zip(names[1:], completions[1:], strict=True):
        record = decode_record(name, _pairs(completion[0]))
        if record is None or record.create_time_unix_s < first.create_time_unix_s:
            record = _missing(name, first)
        records.append(record)
    return records


def decode_stored(request_id: str, answer: Sequence[Any]) -> Stored | None:
    """The answer of the read script to a reading of everything; None: an unknown request."""
    *completions, (spec, prompt_logprobs) = answer
    records = decode_records(request_id, completions)
    if not records:
        return None
    return Stored(
        request_id=request_id,
        spec=spec,
        completions=[
            StoredCompletion(record=record, token_ids=tokens, logprobs=logprobs)
            if record.epoch
            else StoredCompletion(record=record)
            for record, (_, tokens, logprobs) in zip(records, completions, strict=True)
        ],
        prompt_logprobs=prompt_logprobs,
    )


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """A hash as a script returns it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _missing(name: str, first: Record) -> Record:
    return Record(
        request_id=name,
        state=State.QUEUED,
        epoch=0,
        create_time_unix_s=first.create_time_unix_s,
        update_time_unix_s=first.update_time_unix_s,
        num_completions=first.num_completions,
        tenant=first.tenant,
        model=first.model,
        prompt_tokens=first.prompt_tokens,
        router_id=first.router_id,
        router_incarnation=first.router_incarnation,
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


_PARSERS: dict[str, Any] = {
    "state": State,
    **dict.fromkeys(("create_time_unix_s", "update_time_unix_s"), float),
    **dict.fromkeys(
        (
            *("epoch", "num_completions", "prompt_tokens", "cached_tokens", "completion_tokens"),
            *("stop_token_id", "num_recoveries", "journal_tokens"),
        ),
        int,
    ),
}
