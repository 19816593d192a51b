-- Rollouts: the queue, leases, results, and the events of their states.
--
-- `r:ID` is a small hash, whose short names keep it compact: `n` number, `s` state, `a` attempts, `t` token, `o` number of
-- the owner, `c` cancellation requested, `f` fingerprint, `p` pool, `e` environment, `C` created, `Q` queued, `H` changed
-- (Unix seconds), `w` reward, `S` stop reason, `k` code, `R` run, `G` group, `b` where it branches, `v` and `V` oldest and newest version, `B` bytes
-- of the trajectory, `z` written by `finish`, `T` turns, `N` sampled tokens, `W` seconds of work, `Y` erased, so no steps are kept. Long
-- texts have keys of their own: `q:ID` request, `x:ID` result, `t:ID` trajectory, `h:ID` retries and spans of earlier
-- attempts, `u:ID` the turns of one that was interrupted, `y:ID` the steps of all attempts.
--
-- A queued rollout that nobody holds is in `ready:POOL NUL ENVIRONMENT` by number and in `since:POOL NUL ENVIRONMENT` by
-- when it was queued or, until its delay is over, in `delayed`; a leased one is in `leases` by the end of its lease, and in `held:OWNER`. `state:STATE` has all by number.

local rollouts = {}

rollouts.STATES = {'queued', 'init', 'rollout', 'evaluate', 'completed', 'failed', 'cancelled'}
local TERMINAL = {completed = true, failed = true, cancelled = true}
local TOMBSTONES_KEPT = 100000
local AHEAD = 256  -- how many more rollouts than it takes a claim that must wait for some puts in order

local function at(call, kind, id)
    return call:key(kind .. ':' .. id)
end

local function read(call, id, ...)
    local found = redis.call('HMGET', at(call, 'r', id), ...)
    for index = 1, select('#', ...) do
        found[index] = common.value(found[index])
    end
    return unpack(found, 1, select('#', ...))
end

local function queue_name(pool, environment)
    return pool .. '\0' .. environment
end

-- Append the event of a rollout's present state.
local function announce(call, kind, id, with_outcome)
    local state, attempt, reward, stop_reason, code = read(call, id, 's', 'a', 'w', 'S', 'k')
    local data = '{"state":"' .. state .. '","attempt":' .. attempt
    if with_outcome then
        data = data .. (reward and ',"reward":' .. reward or '')
        data = data .. (stop_reason and ',"stop_reason":' .. cjson.encode(stop_reason) or '')
        data = data .. (code and ',"code":' .. cjson.encode(code) or '')
    end
    return call:event(kind, id, data .. '}')
end

-- Record a state; it is an event if it differs.
local function move(call, id, state)
    local before, number = read(call, id, 's', 'n')
    redis.call('HSET', at(call, 'r', id), 's', state, 'H', common.number(call.now))
    if before == state then
        return
    end
    redis.call('ZREM', call:key('state:' .. before), id)
    redis.call('ZADD', call:key('state:' .. state), number, id)
    announce(call, 'rollout.state', id, true)
end

local function owner_number(call, owner)
    local key = call:key('holders')
    local number = common.value(redis.call('HGET', key, owner))
    if not number then
        number = tostring(redis.call('INCR', call:key('holders:last')))
        redis.call('HSET', key, owner, number)
        redis.call('HSET', call:key('holders:names'), number, owner)
    end
    return number
end

-- Put a rollout that nobody holds into its queue; return its pool and environment.
local function put(call, id, not_before)
    local number, pool, environment, since = read(call, id, 'n', 'p', 'e', 'Q')
    local queue = queue_name(pool, environment)
    if not_before and not_before > call.now then
        redis.call('ZADD', call:key('delayed'), common.number(not_before), id)
    else
        redis.call('SADD', call:key('queues'), queue)
        redis.call('ZADD', call:key('ready:' .. queue), number, id)
        redis.call('ZADD', call:key('since:' .. queue), since, id)
    end
    return pool, environment
end

-- Put a rollout that nobody holds into its queue, and wake an owner, which claims it or learns when it may.
local function enqueue(call, id, not_before)
    local pool, environment = put(call, id, not_before)
    idle.wake(call, pool, environment, math.huge)
end

local function dequeue(call, id)
    local pool, environment = read(call, id, 'p', 'e')
    local queue = queue_name(pool, environment)
    redis.call('ZREM', call:key('ready:' .. queue), id)
    redis.call('ZREM', call:key('since:' .. queue), id)
    redis.call('ZREM', call:key('delayed'), id)
end

-- Take a rollout out of the hands of its owner.
local function drop_lease(call, id)
    local owner = read(call, id, 'o')
    redis.call('ZREM', call:key('leases'), id)
    redis.call('SREM', call:key('held:' .. owner), id)
    redis.call('SREM', call:key('cancelling:' .. owner), id)
    redis.call('HDEL', at(call, 'r', id), 'o')
end

-- Tell those who wait for the end of a rollout, and note it for retention.
local function after_end(call, id, state)
    call:publish('rollout:' .. id, state)
    if read(call, id, 'R') then
        call:publish('runs', id)
    else
        redis.call('RPUSH', call:key('ended'), id)
    end
end

-- End a rollout that nobody holds; `fields` are further ones of its hash, at least one.
local function close(call, id, state, fields)
    local key = at(call, 'r', id)
    redis.call('HSET', key, unpack(fields))
    redis.call('HDEL', key, 'c')
    redis.call('UNLINK', at(call, 'u', id))
    move(call, id, state)
    after_end(call, id, state)
end

local function cancel_now(call, id)
    index.set_code(call, id, nil)
    close(call, id, 'cancelled', {'S', 'cancelled'})
end

-- Queue a rollout that nobody holds any more, or end it if its cancellation was requested.
local function requeue(call, id, not_before)
    if read(call, id, 'c') then
        return cancel_now(call, id)
    end
    redis.call('HSET', at(call, 'r', id), 'Q', common.number(call.now))
    if read(call, id, 's') == 'queued' then
        announce(call, 'rollout.state', id, true)  -- its lease is over
    end
    move(call, id, 'queued')
    enqueue(call, id, not_before)
end

local function holds(call, id, owner, token)
    local number, present = read(call, id, 'o', 't')
    return number and present == token and number == common.value(redis.call('HGET', call:key('holders'), owner))
end

-- Return everything that is stored of a rollout but its trajectory, false if it is unknown.
function rollouts.row(call, id)
    local fields = redis.call('HGETALL', at(call, 'r', id))
    if #fields == 0 then
        return false
    end
    local earlier = redis.call('HMGET', at(call, 'h', id), 'retries', 'spans')
    local texts = redis.call('MGET', at(call, 'q', id), at(call, 'x', id))
    return {id, fields, texts[1], texts[2], earlier[1], earlier[2], redis.call('LLEN', at(call, 'u', id))}
end

-- Return whether a rollout exists with another request.
function rollouts.conflicts(call, id, fingerprint)
    local found = read(call, id, 'f')
    return found ~= nil and found ~= fingerprint
end

-- Make a rollout durable unless it exists; `new` has `id`, `fingerprint`, `pool`, `request` and, in a run, `run` and
-- `group`. Return whether it is new.
function rollouts.submit(call, new)
    local key, id = at(call, 'r', new.id), new.id
    if redis.call('EXISTS', key) == 1 then
        return false
    end
    local now = common.number(call.now)
    local number = redis.call('INCR', call:key('rollouts:last'))
    local is_dead = redis.call('ZREM', call:key('tombstones'), id) == 1
    local state = is_dead and 'cancelled' or 'queued'
    local request = cjson.decode(new.request)
    local environment = request.task.environment
    redis.call('HSET', key, 'n', number, 's', state, 'a', 0, 't', 0, 'f', new.fingerprint, 'p', new.pool, 'e', environment,
        'C', now, 'Q', now, 'H', now)
    if new.run then
        redis.call('HSET', key, 'R', new.run, 'G', new.group)
    end
    if request.branch_of then
        redis.call('HSET', key, 'b', cjson.encode(request.branch_of))
    end
    index.enter(call, id, number, environment, new.run)
    redis.call('SET', at(call, 'q', id), new.request)
    redis.call('ZADD', call:key('state:' .. state), number, id)
    if is_dead then
        redis.call('HSET', key, 'S', 'cancelled')
        after_end(call, id, state)
    else
        enqueue(call, id)
    end
    announce(call, 'rollout.state', id, true)
    return true
end

-- Requeue what an owner holds, or only these of it; `uncounted` takes back the attempts that had begun. Return how many
-- that was.
function rollouts.take_back(call, owner, ids, uncounted)
    local number = common.value(redis.call('HGET', call:key('holders'), owner))
    local taken = 0
    if not number then
        return taken
    end
    for _, id in ipairs(ids or redis.call('SMEMBERS', call:key('held:' .. number))) do
        local holder, state = read(call, id, 'o', 's')
        if holder == number then
            if uncounted and state ~= 'queued' then
                redis.call('HINCRBY', at(call, 'r', id), 'a', -1)
            end
            drop_lease(call, id)
            taken = taken + 1
            requeue(call, id)
        end
    end
    if not ids then
        idle.leave(call, owner)
        redis.call('HDEL', call:key('holders'), owner)
        redis.call('HDEL', call:key('holders:names'), number)
        redis.call('HDEL', call:key('claims'), owner)
    end
    return taken
end

cluster.when_gone(function(call, owner, crashed)
    return rollouts.take_back(call, owner, nil, not crashed)
end)

-- Delete the trajectory of a rollout.
function rollouts.forget(call, id)
    segments.drop(call, redis.call('GET', at(call, 't', id)))
    redis.call('UNLINK', at(call, 't', id))
    redis.call('HDEL', at(call, 'r', id), 'B')
end

-- Erase what a rollout that has ended contains; `result` is what is left of its result, '' if it has none.
function rollouts.erase(call, id, result)
    rollouts.forget(call, id)
    redis.call('UNLINK', at(call, 'u', id), at(call, 'y', id))
    if result ~= '' then
        redis.call('SET', at(call, 'x', id), result)
    end
    if redis.call('EXISTS', at(call, 'r', id)) == 1 then
        index.remove_reward(call, id)
        redis.call('HDEL', at(call, 'r', id), 'w')
        redis.call('HSET', at(call, 'r', id), 'Y', '1')
    end
end

-- Delete a rollout that has ended.
function rollouts.delete(call, id)
    local state = read(call, id, 's')
    if state and TERMINAL[state] then
        rollouts.forget(call, id)
        index.remove(call, id)
        redis.call('ZREM', call:key('state:' .. state), id)
        redis.call('UNLINK', at(call, 'r', id), at(call, 'q', id), at(call, 'x', id), at(call, 'h', id),
            at(call, 'y', id))
    end
end

common.register('rollouts_submit', function(call, id, fingerprint, pool, request)
    if rollouts.conflicts(call, id, fingerprint) then
        return {'conflict'}
    end
    local is_new = rollouts.submit(call, {id = id, fingerprint = fingerprint, pool = pool, request = request})
    return {is_new and 'new' or 'known', rollouts.row(call, id)}
end)

-- -- claims ---------------------------------------------------------------------

local function start_delayed(call)
    local key = call:key('delayed')
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', common.number(call.now))) do
        redis.call('ZREM', key, id)
        put(call, id)
    end
end

-- Add the ready rollouts of one queue to `found`, up to the limit.
local function find_ready(call, queue, limit, found)
    local ids = limit > 0 and redis.call('ZRANGE', call:key('ready:' .. queue), 0, limit - 1, 'WITHSCORES') or {}
    for index = 1, #ids, 2 do
        table.insert(found, {id = ids[index], number = tonumber(ids[index + 1])})
    end
end

-- Add the ready rollouts of one queue that have waited to `found`, at least up to the limit; return when the next has.
local function find_waited(call, queue, wait, limit, found)
    local key = call:key('since:' .. queue)
    local till = common.number(call.now - wait)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', till, 'LIMIT', 0, limit + AHEAD)) do
        table.insert(found, {id = id, number = tonumber(read(call, id, 'n'))})
    end
    local next = redis.call('ZRANGEBYSCORE', key, '(' .. till, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    return next and tonumber(next) + wait or math.huge
end

-- Add the leases of others that ran out to `found`, and end those whose cancellation was requested, into `ended`; return
-- when the next one is due.
local function find_expired(call, owner, filter, found, ended)
    local key, start = call:key('leases'), 0
    if redis.call('ZCARD', key) == redis.call('SCARD', call:key('held:' .. owner)) then
        return math.huge  -- nobody else holds any
    end
    while true do
        local page = redis.call('ZRANGE', key, start, start + 99, 'WITHSCORES')
        for index = 1, #page, 2 do
            local id, till = page[index], tonumber(page[index + 1])
            local holder, cancel, number, pool, environment = read(call, id, 'o', 'c', 'n', 'p', 'e')
            local suits = filter.wait(pool, environment)
            if holder ~= owner and till > call.now and suits then
                return till
            elseif holder ~= owner and till <= call.now and cancel then
                table.insert(ended, id)
            elseif holder ~= owner and till <= call.now and suits then
                table.insert(found, {id = id, number = tonumber(number), till = till})
            end
        end
        if #page < 200 then
            return math.huge
        end
        start = start + 100
    end
end

local function lease(call, one, owner, till)
    local key = at(call, 'r', one.id)
    if one.till then
        drop_lease(call, one.id)
        redis.call('HSET', key, 'Q', common.number(one.till))
    else
        dequeue(call, one.id)
    end
    index.set_code(call, one.id, nil)
    redis.call('HINCRBY', key, 't', 1)
    redis.call('HSET', key, 'o', owner)
    move(call, one.id, 'queued')
    redis.call('ZADD', call:key('leases'), common.number(till), one.id)
    redis.call('SADD', call:key('held:' .. owner), one.id)
end

-- Return the rows of the leases that earlier claims of this session took and whose answers were lost, and their tokens by
-- id; `since` is the number of the first of these claims, 0 if there is none.
local function claimed_before(call, owner, number, session, since)
    local rows, tokens, last = {}, {}, common.value(redis.call('HGET', call:key('claims'), owner))
    local record = last and tonumber(since) > 0 and cjson.decode(last)
    if not record or record.session ~= session or record.number < tonumber(since) then
        return rows, tokens
    end
    for id, token in pairs(record.tokens) do
        local holder, present = read(call, id, 'o', 't')
        if holder == number and present == token then
            table.insert(rows, rollouts.row(call, id))
            tokens[id] = token
        end
    end
    return rows, tokens
end

-- Return {seconds until there may be more, latest wake-up, rows}. `session` and `claim` number this claim,
-- and `since` is the number of the first one since the last answer that arrived, 0 if none was lost: what these took is
-- returned again.
common.register('rollouts_claim', function(call, owner, wanted, seconds, pools, waits, session, claim, since)
    if cluster.is_dead(call, owner) then
        return {'', idle.latest(call), {}}
    end
    idle.leave(call, owner)
    local filter, class = idle.filter(pools, waits)
    local number, found, ended = owner_number(call, owner), {}, {}
    local rows, tokens = claimed_before(call, owner, number, session, since)
    while #rows > tonumber(wanted) do  -- there is less room than there was
        local id = table.remove(rows)[1]
        tokens[id] = nil
        drop_lease(call, id)
        requeue(call, id)
    end
    if cluster.is_draining(call, owner) then
        return {'', idle.latest(call), rows}
    end
    local limit = tonumber(wanted) - #rows
    start_delayed(call)
    local due = find_expired(call, number, filter, found, ended)
    for _, id in ipairs(ended) do
        drop_lease(call, id)
        cancel_now(call, id)
    end
    for _, queue in ipairs(redis.call('SMEMBERS', call:key('queues'))) do
        local pool, environment = string.match(queue, '^(.-)%z(.*)$')
        local wait = filter.wait(pool, environment)
        if redis.call('EXISTS', call:key('ready:' .. queue)) == 0 then
            redis.call('SREM', call:key('queues'), queue)
        elseif wait and wait > 0 then
            due = math.min(due, find_waited(call, queue, wait, limit, found))
        elseif wait then
            find_ready(call, queue, limit, found)
        end
    end
    table.sort(found, function(one, other) return one.number < other.number end)
    local till = call.now + tonumber(seconds)
    for id in pairs(tokens) do
        redis.call('ZADD', call:key('leases'), common.number(till), id)
    end
    for index = 1, math.min(limit, #found) do
        lease(call, found[index], number, till)
        table.insert(rows, rollouts.row(call, found[index].id))
        tokens[found[index].id] = read(call, found[index].id, 't')
    end
    if next(tokens) then
        redis.call('HSET', call:key('claims'), owner,
            cjson.encode({session = session, number = tonumber(claim), tokens = tokens}))
    end
    idle.offer(call)
    if #rows < tonumber(wanted) then
        idle.enter(call, owner, class)
    end
    local delayed = redis.call('ZRANGE', call:key('delayed'), 0, 0, 'WITHSCORES')[2]
    due = math.min(due, delayed and tonumber(delayed) or math.huge)
    return {due == math.huge and '' or common.number(due - call.now), idle.latest(call), rows}
end)

-- Renew leases; return the ids of those that the owner has lost.
common.register_freeing('rollouts_renew', function(call, owner, seconds, ...)
    local number, lost = common.value(redis.call('HGET', call:key('holders'), owner)), {}
    for _, id in ipairs({...}) do
        if number and read(call, id, 'o') == number then
            redis.call('ZADD', call:key('leases'), common.number(call.now + tonumber(seconds)), id)
        else
            table.insert(lost, id)
        end
    end
    return lost
end)

-- Return rollouts that an owner holds and the tokens of its leases, in turn.
common.register_read('rollouts_held', function(call, owner)
    local number, found = common.value(redis.call('HGET', call:key('holders'), owner)), {}
    for _, id in ipairs(number and redis.call('SMEMBERS', call:key('held:' .. number)) or {}) do
        table.insert(found, id)
        table.insert(found, read(call, id, 't'))
    end
    return found
end)

common.register_freeing('rollouts_take_back', function(call, owner, uncounted, ids)
    return rollouts.take_back(call, owner, ids ~= '' and cjson.decode(ids) or nil, uncounted == '1')
end)

-- -- attempts -------------------------------------------------------------------

local ORDER = {queued = 0, init = 1, rollout = 2, evaluate = 3}

-- Return 'done', 'lost', or the state that is beyond this one.
common.register_freeing('rollouts_advance', function(call, id, owner, token, state)
    if not holds(call, id, owner, token) then
        return 'lost'
    end
    local before = read(call, id, 's')
    if ORDER[before] > ORDER[state] then
        return before
    end
    if before == 'queued' then
        redis.call('HINCRBY', at(call, 'r', id), 'a', 1)
    end
    move(call, id, state)
    return 'done'
end)

-- Return whether the lease was held (0 or 1).
common.register('rollouts_retry', function(call, id, owner, token, problem, code, spans, delay, keeps_turns)
    if not holds(call, id, owner, token) then
        return 0
    end
    local key, history = at(call, 'r', id), at(call, 'h', id)
    if read(call, id, 's') == 'queued' then
        redis.call('HINCRBY', key, 'a', 1)
    end
    local earlier = common.value(redis.call('HGET', history, 'retries'))
    redis.call('HSET', history, 'retries', earlier and earlier .. ',' .. problem or problem, 'spans', spans)
    index.set_code(call, id, code)
    if keeps_turns == '0' then
        redis.call('UNLINK', at(call, 'u', id))
    end
    drop_lease(call, id)
    requeue(call, id, call.now + tonumber(delay))
    return 1
end)

-- Queue a rollout again with its first `kept` turns and its attempt not counted; return as `rollouts_retry` does.
common.register('rollouts_restart', function(call, id, owner, token, spans, kept)
    if not holds(call, id, owner, token) then
        return 0
    end
    if read(call, id, 's') ~= 'queued' then
        redis.call('HINCRBY', at(call, 'r', id), 'a', -1)
    end
    redis.call('HSET', at(call, 'h', id), 'spans', spans)
    if kept == '0' then
        redis.call('UNLINK', at(call, 'u', id))
    else
        redis.call('LTRIM', at(call, 'u', id), 0, kept - 1)
    end
    drop_lease(call, id)
    requeue(call, id)
    return 1
end)

-- Save turns, of which each has four arguments: rollout, token, number, data. Return how many were saved: those of
-- leases that are held, without a gap.
common.register('rollouts_save_turns', function(call, owner, ...)
    local turns, saved = {...}, 0
    for index = 1, #turns, 4 do
        local id, token, number, data = unpack(turns, index, index + 3)
        local key = at(call, 'u', id)
        if holds(call, id, owner, token) and redis.call('LLEN', key) == tonumber(number) then
            redis.call('RPUSH', key, data)
            saved = saved + 1
        end
    end
    return saved
end)

-- Store the steps of attempts, of which each has two arguments: rollout, data. Return how many were stored: those of
-- rollouts that exist, are not to be forgotten, and have fewer than `most`.
common.register('rollouts_save_steps', function(call, most, ...)
    local attempts, saved = {...}, 0
    for index = 1, #attempts, 2 do
        local id, data = attempts[index], attempts[index + 1]
        local key = at(call, 'y', id)
        local number, is_forgotten = read(call, id, 'n', 'Y')
        if number and not is_forgotten and redis.call('LLEN', key) < tonumber(most) then
            redis.call('RPUSH', key, data)
            saved = saved + 1
        end
    end
    return saved
end)

-- Write a result; an empty text stands for none. `again` repeats a call whose answer was lost. Return whether the lease
-- was held (0 or 1), or 2 if the trajectory's file is not open; then nothing is written.
common.register('rollouts_finish', function(call, id, owner, token, again, state, result, trajectory, ...)
    if not holds(call, id, owner, token) then
        local present, is_result = read(call, id, 't', 'z')
        return (again == '1' and present == token and is_result == '1') and 1 or 0
    end
    if not segments.add(call, trajectory) then
        return 2
    end
    local key, fields, names = at(call, 'r', id), {'z', '1'}, {'w', 'S', 'k', 'v', 'V', 'T', 'N', 'W'}
    local outcome = {}
    for place, value in ipairs({...}) do
        if value ~= '' then
            outcome[names[place]] = value
            table.insert(fields, names[place])
            table.insert(fields, value)
        end
    end
    redis.call('SET', at(call, 'x', id), result)
    if trajectory ~= '' then
        redis.call('SET', at(call, 't', id), trajectory)
        redis.call('HSET', key, 'B', segments.size(trajectory))
    end
    index.enter_outcome(call, id, outcome.k, outcome.w)
    redis.call('HDEL', key, 'S', 'k')
    drop_lease(call, id)
    close(call, id, state, fields)
    return 1
end)

-- Return the state before, which is empty for an unknown rollout.
common.register_freeing('rollouts_cancel', function(call, id)
    local state, owner, cancel = read(call, id, 's', 'o', 'c')
    if not state then
        local key = call:key('tombstones')
        redis.call('ZADD', key, 'NX', redis.call('INCR', call:key('tombstones:last')), id)
        redis.call('ZREMRANGEBYRANK', key, 0, -TOMBSTONES_KEPT - 1)
        return ''
    end
    if TERMINAL[state] then
        return state
    end
    if not owner then
        dequeue(call, id)
        cancel_now(call, id)
        return state
    end
    if not cancel then
        redis.call('HSET', at(call, 'r', id), 'c', '1')
        redis.call('SADD', call:key('cancelling:' .. owner), id)
        local event = announce(call, 'rollout.cancel_requested', id, false)
        local name = common.value(redis.call('HGET', call:key('holders:names'), owner))
        if name then
            call:publish('owner:' .. name, 'cancel ' .. event)
        end
    end
    return state
end)

common.register_read('rollouts_cancelling', function(call, owner)
    local number = common.value(redis.call('HGET', call:key('holders'), owner))
    return {call:newest(), number and redis.call('SMEMBERS', call:key('cancelling:' .. number)) or {}}
end)

-- -- reading --------------------------------------------------------------------

common.register_read('rollouts_rows', function(call, with_trajectory, ...)
    local rows = {}
    for index, id in ipairs({...}) do
        local row = rollouts.row(call, id)
        if row and with_trajectory == '1' then
            row[8] = redis.call('GET', at(call, 't', id))
        end
        rows[index] = row
    end
    return rows
end)

common.register_read('rollouts_saved_steps', function(call, ...)
    local found = {}
    for index, id in ipairs({...}) do
        found[index] = redis.call('LRANGE', at(call, 'y', id), 0, -1)
    end
    return found
end)

local function counts(call)
    local found = {}
    for index, state in ipairs(rollouts.STATES) do
        found[index] = redis.call('ZCARD', call:key('state:' .. state))
    end
    return found
end

common.register_read('rollouts_counts', counts)

-- Return {rows with numbers above `after`, counts}, only those in `state` unless it is empty.
common.register_read('rollouts_page', function(call, state, after, limit)
    local found = {}
    for _, one in ipairs(state ~= '' and {state} or rollouts.STATES) do
        local key = call:key('state:' .. one)
        local ids = redis.call('ZRANGEBYSCORE', key, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
        for index = 1, #ids, 2 do
            table.insert(found, {id = ids[index], number = tonumber(ids[index + 1])})
        end
    end
    table.sort(found, function(one, other) return one.number < other.number end)
    local rows = {}
    for index = 1, math.min(tonumber(limit), #found) do
        rows[index] = rollouts.row(call, found[index].id)
    end
    return {rows, counts(call)}
end)

common.register('events_record', function(call, kind, subject, data)
    return {call:event(kind, subject, data), common.number(call.now)}
end)

-- -- retention ------------------------------------------------------------------

-- Delete rollouts of no run that ended at least `age` seconds ago, the oldest first; return how many.
common.register_freeing('rollouts_delete_expired', function(call, age, limit)
    local key, deleted = call:key('ended'), 0
    while deleted < tonumber(limit) do
        local id = common.value(redis.call('LINDEX', key, 0))
        local ended = id and read(call, id, 'H')
        if not id or (ended and tonumber(ended) > call.now - tonumber(age)) then
            break
        end
        redis.call('LPOP', key)
        rollouts.delete(call, id)
        deleted = deleted + 1
    end
    return deleted
end)
