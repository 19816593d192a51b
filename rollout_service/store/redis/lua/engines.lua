-- Backends of all services, and the commands to pools: one open command a pool, which ends once.

local engines = {}

local RESULTS_KEPT = 64

function engines.changed(call, kind, pool, number)
    call:event(kind, pool, string.format('{"number":%d}', number))
end

-- Add a backend, or replace it; its place in the order stays.
common.register('engines_put', function(call, id, record)
    redis.call('HSET', call:key('backends'), id, record)
    redis.call('ZADD', call:key('backends:order'), 'NX', string.format('%.6f', call.now), id)
    call:event('backend.changed', id, '{}')
end)

common.register_freeing('engines_remove', function(call, id)
    redis.call('ZREM', call:key('backends:order'), id)
    local removed = redis.call('HDEL', call:key('backends'), id)
    if removed == 1 then
        call:event('backend.changed', id, '{}')
    end
    return removed
end)

common.register_read('engines_list', function(call)
    local ids = redis.call('ZRANGE', call:key('backends:order'), 0, -1)
    if #ids == 0 then
        return {}
    end
    return redis.call('HMGET', call:key('backends'), unpack(ids))
end)

-- Open a command; return its number, or 0 while a different one is open.
common.register('engines_ask', function(call, pool, kind, request)
    local key = call:key('pool:' .. pool)
    local found = redis.call('HMGET', key, 'number', 'open', 'kind', 'request')
    local number = tonumber(common.value(found[1]) or '0')
    if common.value(found[2]) == '1' then
        return (found[3] == kind and found[4] == request) and number or 0
    end
    number = number + 1
    redis.call('HSET', key, 'number', number, 'open', '1', 'kind', kind, 'request', request)
    redis.call('DEL', call:key('pool:' .. pool .. ':held'))
    redis.call('SADD', call:key('pools'), pool)
    engines.changed(call, 'pool.command', pool, number)
    return number
end)

-- Return the fields of every pool: name, number, kind, request, open, state, revision, and who holds.
common.register_read('engines_pools', function(call)
    local answer = {}
    for _, pool in ipairs(redis.call('SMEMBERS', call:key('pools'))) do
        local key = call:key('pool:' .. pool)
        local record = redis.call('HMGET', key, 'number', 'kind', 'request', 'open', 'state', 'revision')
        local held = redis.call('SMEMBERS', key .. ':held')
        answer[#answer + 1] = {pool, record, held}
    end
    return answer
end)

local function is_open(key, number)
    local found = redis.call('HMGET', key, 'number', 'open')
    return common.value(found[1]) == number and common.value(found[2]) == '1'
end

common.register('engines_hold', function(call, pool, number, owner)
    local key = call:key('pool:' .. pool)
    if is_open(key, number) and redis.call('SADD', key .. ':held', owner) == 1 then
        engines.changed(call, 'pool.held', pool, tonumber(number))
    end
end)

-- Note that a service carries the open command out; return whether it is the first to begin.
common.register('engines_begin', function(call, pool, number)
    local key = call:key('pool:' .. pool)
    if not is_open(key, number) or common.value(redis.call('HGET', key, 'begun')) == number then
        return 0
    end
    redis.call('HSET', key, 'begun', number)
    return 1
end)

-- End the open command with its result and the pool's new state, in one step.
common.register('engines_finish', function(call, pool, number, result, state)
    local key = call:key('pool:' .. pool)
    if not is_open(key, number) then
        return 0
    end
    redis.call('HSET', key, 'open', '0', 'state', state)
    redis.call('HINCRBY', key, 'revision', 1)
    redis.call('DEL', key .. ':held')
    redis.call('HSET', key .. ':results', number, result)
    redis.call('HDEL', key .. ':results', tostring(tonumber(number) - RESULTS_KEPT))
    engines.changed(call, 'pool.settled', pool, tonumber(number))
    return 1
end)

-- Replace the state of a pool without an open command, if nobody else has meanwhile.
common.register('engines_save_state', function(call, pool, revision, state)
    local key = call:key('pool:' .. pool)
    local found = redis.call('HMGET', key, 'open', 'revision', 'number')
    if common.value(found[1]) == '1' or (common.value(found[2]) or '0') ~= revision then
        return 0
    end
    redis.call('HSET', key, 'state', state)
    redis.call('HINCRBY', key, 'revision', 1)
    redis.call('SADD', call:key('pools'), pool)
    engines.changed(call, 'pool.settled', pool, tonumber(common.value(found[3]) or '0'))
    return 1
end)
