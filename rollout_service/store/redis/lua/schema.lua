-- The version of what is stored under a prefix, and the steps from each version to the next.

local schema = {}

local APPLICATION = 'rollout-service'

-- Step n takes a store from version n to version n + 1, within one call.
local STEPS = {}
local VERSION = #STEPS + 1

-- Return {application, version, this release's version} after bringing what is stored up to date; it is left alone if it
-- is another program's, or a newer release's. A store without an id gets the proposed one.
common.register('schema_migrate', function(call, id)
    local key = call:key('meta')
    local kind = redis.call('TYPE', key)
    if kind.ok ~= 'none' and kind.ok ~= 'hash' then
        return {kind.ok, 0, VERSION}
    end
    local found = redis.call('HMGET', key, 'application', 'version')
    local application, version = common.value(found[1]), tonumber(common.value(found[2]))
    if kind.ok == 'none' then
        application, version = APPLICATION, VERSION
        redis.call('HSET', key, 'application', application, 'version', version)
        redis.call('HSET', call:key('index'), 'form', common.FORM)
    end
    if application ~= APPLICATION or not version or version > VERSION then
        return {application or '', version or 0, VERSION}
    end
    for step = version, VERSION - 1 do
        STEPS[step](call)
        redis.call('HSET', key, 'version', step + 1)
    end
    if id then
        redis.call('HSETNX', call:key('segments:mark'), 'id', id)
    end
    return {application, VERSION, VERSION}
end)
