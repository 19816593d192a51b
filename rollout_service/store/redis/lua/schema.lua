-- The version of what is stored under a prefix.

local APPLICATION = 'rollout-service'
local VERSION = 1

-- Begin a store if there is none, and return {application, version, this release's version} of what is stored. Another
-- program's and another version's are left alone. A store without an id gets the proposed one.
common.register('schema_open', function(call, id)
    local key = call:key('meta')
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
        redis.call('HSET', key, 'application', APPLICATION, 'version', VERSION)
    elseif kind ~= 'hash' then
        return {kind, 0, VERSION}
    end
    local found = redis.call('HMGET', key, 'application', 'version')
    local application, version = found[1] or '', tonumber(found[2] or 0) or 0
    -- A later version of the schema would bring a store of an earlier one up to date here, within this call.
    if id and application == APPLICATION and version == VERSION then
        redis.call('HSETNX', call:key('segments:mark'), 'id', id)
    end
    return {application, version, VERSION}
end)
