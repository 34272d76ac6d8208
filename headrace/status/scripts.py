"""The Lua scripts that change and read requests in the store; the state table becomes part of them.

All keys of a request carry one hash tag, so that a script may reach them in a cluster. KEYS names
each request's spec; the names of the other keys follow from it (`keys.py`). The first argument is
msgpack. Binary values are arguments of their own, because the server's msgpack knows only text.
"""

from collections.abc import Iterable

from headrace.status import states
from headrace.status.states import State, Writer

_COMMON = """
local BORN, ROUTER, ROUTER_RUN = 'create_time_unix_s', 'router_id', 'router_incarnation'
local OF_COMPLETION = {'status', 'tokens', 'logprobs'}
local function key_of(base, what, k) return base .. what .. '#' .. k end
local function base_of(spec_key) return string.sub(spec_key, 1, -5) end
-- In pieces: unpack() takes a few thousand values at most.
local function push(key, first, last)
  for i = first, last, 1000 do
    redis.call('RPUSH', key, unpack(ARGV, i, math.min(i + 999, last)))
  end
end
-- All keys of a completion live as long as its record. The spec and the records of completions
-- that have ended are kept until the last completion has ended.
local function expire(base, k, ttl_ms)
  for _, what in ipairs(OF_COMPLETION) do
    redis.call('PEXPIRE', key_of(base, what, k), ttl_ms)
  end
  redis.call('PEXPIRE', base .. 'spec', ttl_ms)
  redis.call('PEXPIRE', base .. 'prompt_logprobs', ttl_ms)
end
local function is_over(base, num_completions)
  for k = 0, num_completions - 1 do
    local state = redis.call('HGET', key_of(base, 'status', k), 'state')
    if not state or LIVE[state] then return false end
  end
  return true
end
local function refresh(base, k, num_completions, state)
  local has_ended = not LIVE[state] and is_over(base, num_completions)
  if has_ended then
    for each = 0, num_completions - 1 do expire(base, each, ENDED_TTL_MS) end
  else
    expire(base, k, LIVE_TTL_MS)
  end
  return has_ended
end
"""

# ARGV[1]: of each request in KEYS, its items in order.
# An update: {k, state, epoch, create time or "", the writer's name, the writer's incarnation,
# completions or 0, the spec's argument or 0, {field, value, ...}}.
# Tokens: {k, "", epoch, create time or "", name, incarnation, position, their argument, number of
# logprobs, number of prompt logprobs}; logprobs are the next arguments, then prompt logprobs.
# Returns {item, verdict, epoch, state, number} of items that were not simply applied, and
# {item, "ENDED", router, its incarnation, create time} when no completion of the request lives.
_WRITE = """
local WELL = {STOPPED = true, LENGTH_CAPPED = true, REPETITION = true}
local notes, num_items = {}, 0
-- Completions with a piece in this call that came after a gap. Their final states have to wait for
-- the missing tokens: whoever reads a final state counts on the whole journal.
local has_gap = {}
local function note(...) notes[#notes + 1] = {num_items, ...} end
local function differs(mine, theirs)
  return mine ~= '' and theirs and theirs ~= '' and mine ~= theirs
end
local function look(base, k)
  local r = redis.call('HMGET', key_of(base, 'status', k), 'state', 'epoch', BORN, 'OWNER_id',
    'OWNER_incarnation', 'scheduler_epoch', 'num_completions', 'journal_epoch')
  return {state = r[1], epoch = tonumber(r[2] or '0'), born = tonumber(r[3] or ''), owner = r[4],
    run = r[5], scheduler_epoch = tonumber(r[6] or ''), num_completions = tonumber(r[7] or k + 1),
    journal_epoch = tonumber(r[8] or '')}
end
-- Whether a record belongs to another router, or in this epoch to another scheduler.
local function is_lost(record, epoch, name, run)
  if IS_SCHEDULER and record.scheduler_epoch ~= epoch then return false end
  return differs(name, record.owner) or differs(run, record.run)
end
local function judge(rule, target, new_epoch, new_born, record, name, run)
  local state, born = record.state, record.born
  if not state then return rule.creates and 'APPLIED' or 'EARLY' end
  if new_born and born and new_born ~= born then
    -- A repeated call may be rejected by another router after the first call was admitted.
    if new_born < born and not (state == 'REJECTED' and rule.takes_over) then return 'OLDER' end
    if not rule.creates then return 'EARLY' end
    -- What has ended well can be read again: a rejected call of its id does not wipe it.
    return (rule.takes_over or not (LIVE[state] or WELL[state])) and 'NEW' or 'ILLEGAL'
  end
  if new_epoch < record.epoch or is_lost(record, new_epoch, name, run) then return 'STALE' end
  if new_epoch > record.epoch then
    -- What has ended is not taken up again.
    return rule.retakes[state] and 'APPLIED' or LIVE[state] and 'EARLY' or 'STALE'
  end
  if state == target then return 'REPEATED' end
  return rule.sources[state] and 'APPLIED' or rule.ahead[state] and 'EARLY' or 'ILLEGAL'
end
local function forget(base, k)
  for _, what in ipairs(OF_COMPLETION) do redis.call('DEL', key_of(base, what, k)) end
end
-- An id is used again. Records of its other completions may be of the new request already.
local function forget_older(base, k, born, num_completions)
  forget(base, k)
  if k > 0 then return end
  redis.call('DEL', base .. 'spec', base .. 'prompt_logprobs')
  for other = 1, num_completions - 1 do
    local theirs = redis.call('HGET', key_of(base, 'status', other), BORN)
    if not theirs or tonumber(theirs) < born then forget(base, other) end
  end
end
local function update(base, item)
  local k, target, epoch, born, name, run, num_completions, spec, values = unpack(item)
  born = tonumber(born)
  local record = look(base, k)
  local verdict = judge(RULES[target], target, epoch, born, record, name, run)
  if verdict == 'APPLIED' and has_gap[base .. k] and not LIVE[target] then verdict = 'EARLY' end
  if verdict == 'NEW' then
    forget_older(base, k, born, record.num_completions)
    verdict, record.num_completions = 'APPLIED', k + 1
  end
  if verdict == 'APPLIED' or (verdict == 'REPEATED' and LIVE[record.state]) then
    if num_completions == 0 then num_completions = record.num_completions end
    redis.call('HSET', key_of(base, 'status', k), 'state', target, 'epoch', epoch, unpack(values))
    if spec > 0 then redis.call('SET', base .. 'spec', ARGV[spec]) end
    if refresh(base, k, num_completions, target) and verdict == 'APPLIED' then
      local owner = redis.call('HMGET', key_of(base, 'status', k), ROUTER, ROUTER_RUN)
      local first = redis.call('HGET', key_of(base, 'status', 0), BORN)
      note('ENDED', owner[1] or '', owner[2] or '', first or '')
    end
  end
  if verdict ~= 'APPLIED' then note(verdict, record.epoch, record.state or '', 0) end
end
local function cut(base, k, position)
  local tokens, logprobs = key_of(base, 'tokens', k), key_of(base, 'logprobs', k)
  if position == 0 then
    redis.call('DEL', tokens, logprobs)
  else
    redis.call('SET', tokens, redis.call('GETRANGE', tokens, 0, 4 * position - 1), 'KEEPTTL')
    redis.call('LTRIM', logprobs, 0, position - 1)
  end
end
local function judge_tokens(record, epoch, born, name, run)
  if not record.state then return 'EARLY' end
  if born and record.born and born ~= record.born then
    return born < record.born and 'OLDER' or 'EARLY'
  end
  if epoch < record.epoch or is_lost(record, epoch, name, run) then return 'STALE' end
  if epoch > record.epoch then return LIVE[record.state] and 'EARLY' or 'STALE' end
end
local function append(base, item)
  local k, _, epoch, born, name, run, position, at, num_logprobs, num_prompt_logprobs = unpack(item)
  local record = look(base, k)
  local verdict = judge_tokens(record, epoch, tonumber(born), name, run)
  if verdict then return note(verdict, record.epoch, record.state or '', 0) end
  local tokens_key, logprobs_key = key_of(base, 'tokens', k), key_of(base, 'logprobs', k)
  local have = redis.call('STRLEN', tokens_key) / 4
  local have_logprobs = num_logprobs > 0 and redis.call('LLEN', logprobs_key) or have
  if position > math.min(have, have_logprobs) then
    has_gap[base .. k] = true
    return note('GAP', record.epoch, record.state, math.min(have, have_logprobs))
  end
  -- The first piece of an epoch: what an earlier epoch wrote beyond it is not this run's.
  if record.journal_epoch ~= epoch then
    redis.call('HSET', key_of(base, 'status', k), 'journal_epoch', epoch)
    if position < have then
      cut(base, k, position)
      have, have_logprobs = position, position
    end
  end
  redis.call('SETRANGE', tokens_key, 4 * position, ARGV[at])
  push(logprobs_key, at + 1 + have_logprobs - position, at + num_logprobs)
  local is_first = have == 0
  if num_prompt_logprobs > 0 and redis.call('EXISTS', base .. 'prompt_logprobs') == 0 then
    push(base .. 'prompt_logprobs', at + num_logprobs + 1, at + num_logprobs + num_prompt_logprobs)
    is_first = true
  end
  if is_first then refresh(base, k, record.num_completions, record.state) end
end
local function write(base, item)
  if item[2] == '' then append(base, item) else update(base, item) end
end
for r, items in ipairs(cmsgpack.unpack(ARGV[1])) do
  local base = base_of(KEYS[r])
  for _, item in ipairs(items) do
    local is_done, failure = pcall(write, base, item)
    if not is_done then
      local text = type(failure) == 'table' and failure.err or tostring(failure)
      -- A key that is not ours must not hold up the others. All else concerns the whole store.
      if not string.find(text, 'WRONGTYPE', 1, true) then return redis.error_reply(text) end
      note('BROKEN', 0, '', 0)
    end
    num_items = num_items + 1
  end
end
return notes
"""

# ARGV[1]: {state, {field, value, ...}, is recovery, {{epoch, create time, is live}, ...}}, the last
# by completion; epoch 0 is no record. Returns 1 if claimed, 0 if the request has changed since.
_CLAIM = """
local base = base_of(KEYS[1])
local target, values, is_recovery, expected = unpack(cmsgpack.unpack(ARGV[1]))
for i, c in ipairs(expected) do
  local epoch, born, is_live = unpack(c)
  local r = redis.call('HMGET', key_of(base, 'status', i - 1), 'state', 'epoch', BORN)
  if tonumber(r[2] or '0') ~= epoch then return 0 end
  if r[3] and tonumber(r[3]) ~= tonumber(born) then return 0 end
  if r[1] and (LIVE[r[1]] or false) ~= is_live then return 0 end
end
for i, c in ipairs(expected) do
  if c[3] then
    local key = key_of(base, 'status', i - 1)
    redis.call('HSET', key, 'state', target, 'epoch', c[1] + 1, 'num_completions', #expected,
      unpack(values))
    if is_recovery then redis.call('HINCRBY', key, 'num_recoveries', 1) end
  end
end
for i, c in ipairs(expected) do
  if c[3] then refresh(base, i - 1, #expected, target) end
end
return 1
"""

# ARGV[1]: "1" to read all that is kept, "" for the records only.
# Returns {record, tokens, logprobs} or {record} by completion, then {spec, prompt logprobs}.
_READ = """
local base, is_whole = base_of(KEYS[1]), ARGV[1] == '1'
local first = redis.call('HGET', key_of(base, 'status', 0), 'num_completions')
local found = {}
for k = 0, tonumber(first or '1') - 1 do
  local record = redis.call('HGETALL', key_of(base, 'status', k))
  if #record > 0 then
    local num_bytes = redis.call('STRLEN', key_of(base, 'tokens', k))
    record[#record + 1] = 'journal_tokens'
    record[#record + 1] = string.format('%d', num_bytes / 4)
  end
  found[k + 1] = {record}
  if is_whole then
    found[k + 1][2] = redis.call('GET', key_of(base, 'tokens', k)) or ''
    found[k + 1][3] = redis.call('LRANGE', key_of(base, 'logprobs', k), 0, -1)
  end
end
if is_whole then
  found[#found + 1] = {
    redis.call('GET', base .. 'spec') or '', redis.call('LRANGE', base .. 'prompt_logprobs', 0, -1)}
end
return found
"""

# KEYS: the lease. ARGV: incarnation, TTL in ms, "1" to take it from another incarnation.
# Returns 1 if the lease is held.
HOLD_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and ARGV[3] ~= '1' then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


def write_script(writer: Writer, *, live_ttl_ms: int, ended_ttl_ms: int) -> str:
    """The script that applies items of `writer`."""
    rules = []
    for target in State:
        sources = states.sources(target, writer)
        rules.append(
            f"{target} = {{creates = {str(None in sources).lower()},"
            f" takes_over = {str(target is State.QUEUED).lower()},"
            f" sources = {_lua_set(s for s in sources if s is not None)},"
            f" retakes = {_lua_set(states.retake_sources(target, writer))},"
            f" ahead = {_lua_set(s for s in State if states.can_become(s, target))}}}"
        )
    script = _WRITE.replace("OWNER", writer)
    return "\n".join(
        (
            f"local RULES = {{{', '.join(rules)}}}",
            f"local IS_SCHEDULER = {str(writer is Writer.SCHEDULER).lower()}",
            _heading(live_ttl_ms, ended_ttl_ms),
            script,
        )
    )


def claim_script(*, live_ttl_ms: int, ended_ttl_ms: int) -> str:
    """The script that takes a request from whoever has it."""
    return f"{_heading(live_ttl_ms, ended_ttl_ms)}\n{_CLAIM}"


def read_script() -> str:
    """The script that reads a request at one moment."""
    return f"{_COMMON}\n{_READ}"


def _heading(live_ttl_ms: int, ended_ttl_ms: int) -> str:
    return (
        f"local LIVE = {_lua_set(s for s in State if not s.is_final)}\n"
        f"local LIVE_TTL_MS, ENDED_TTL_MS = {live_ttl_ms}, {ended_ttl_ms}\n{_COMMON}"
    )


def _lua_set(names: Iterable[State]) -> str:
    return f"{{{', '.join(f'{name} = true' for name in sorted(names))}}}"
