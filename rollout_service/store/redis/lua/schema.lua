-- The version of what is stored under a prefix, and which shard of a store it is.

local APPLICATION = 'rollout-service'
local VERSION = 1

-- Begin a store if there is none, and return {application, version, this release's version, shard, shards, home} of what is
-- stored. Another program's and another version's are left alone. A store without an id gets the proposed one.
common.register('schema_open', function(call, id, shard, shards, home)
    local key = call:key('meta')
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
        redis.call('HSET', key, 'application', APPLICATION, 'version', VERSION,
            'shard', shard or '0', 'shards', shards or '1', 'home', home or '')
    elseif kind ~= 'hash' then
        return {kind, 0, VERSION}
    end
    local found = redis.call('HMGET', key, 'application', 'version', 'shard', 'shards', 'home')
    local application, version = found[1] or '', tonumber(found[2] or 0) or 0
    -- A later version of the schema would bring a store of an earlier one up to date here, within this call.
    if id and application == APPLICATION and version == VERSION then
        redis.call('HSETNX', call:key('segments:mark'), 'id', id)
    end
    return {application, version, VERSION, found[3] or '0', found[4] or '1', found[5] or ''}
end)
