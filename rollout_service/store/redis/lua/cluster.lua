-- The nodes that share the store: who is a member, who is dead, and who leads which role.
--
-- Keys: `node:<name>` a node's record, with the name of the library whose functions it calls; `nodes` the names of all; `nodes_alive` the members by their last heartbeat;
-- `heartbeats` when the last came, and since when they have come without a break; `members` their names by owner;
-- `owners_dead` the owners that were declared dead; `places` what the ready nodes offer, summed; `roles` the names of all
-- roles; `leader:<role>` who leads, and until when.

local cluster = {}

local DEAD_OWNERS_KEPT = 10000
local gone_hooks = {}

-- Call a function (call, owner, crashed) for each owner that leaves or dies, to queue again what it held.
function cluster.when_gone(hook)
    gone_hooks[#gone_hooks + 1] = hook
end

-- Return whether an owner was declared dead and has not joined again.
function cluster.is_dead(call, owner)
    return redis.call('ZSCORE', call:key('owners_dead'), owner) ~= false
end

local function node_key(call, name)
    return call:key('node:' .. name)
end

-- Return whether an owner's node was told to claim no more rollouts.
function cluster.is_draining(call, owner)
    local name = redis.call('HGET', call:key('members'), owner)
    return name and redis.call('HGET', node_key(call, name), 'state') == 'draining'
end

local function changed(call, kind, name, data)
    call:event('node.' .. kind, name, data or '{}')
end

-- Add what a node offers to the sums, or subtract it.
local function offer(call, name, sign)
    local found = redis.call('HMGET', node_key(call, name), 'state', 'places', 'environments', 'images')
    local key, state = call:key('places'), common.value(found[1])
    if not state then
        return
    end
    redis.call('HINCRBY', key, 's:' .. state, sign)
    if state ~= 'ready' then
        return
    end
    redis.call('HINCRBY', key, 'places', string.format('%d', sign * tonumber(found[2])))  -- not -0
    for prefix, list in pairs({['e:'] = found[3], ['i:'] = found[4]}) do
        for _, environment in ipairs(cjson.decode(list)) do
            if redis.call('HINCRBY', key, prefix .. environment, sign) <= 0 then
                redis.call('HDEL', key, prefix .. environment)
            end
        end
    end
end

-- Change fields of a node's record, and the sums with them.
local function change(call, name, ...)
    offer(call, name, -1)
    redis.call('HSET', node_key(call, name), ...)
    offer(call, name, 1)
end

local function resign(call, role, owner)
    local key = call:key('leader:' .. role)
    if redis.call('HGET', key, 'owner') == owner then
        redis.call('HSET', key, 'owner', '', 'until', '0')
        call:publish('cluster', 'role ' .. role)
    end
end

-- End what an owner holds: its leases and its roles.
local function hand_back(call, owner, crashed)
    local requeued = 0
    for _, hook in ipairs(gone_hooks) do
        requeued = requeued + hook(call, owner, crashed)
    end
    for _, role in ipairs(redis.call('SMEMBERS', call:key('roles'))) do
        resign(call, role, owner)
    end
    redis.call('HDEL', call:key('members'), owner)
    return requeued
end

local function declare_dead(call, name)
    local owner = redis.call('HGET', node_key(call, name), 'owner')
    change(call, name, 'state', 'dead')
    redis.call('ZREM', call:key('nodes_alive'), name)
    redis.call('ZADD', call:key('owners_dead'), common.number(call.now), owner)
    redis.call('ZREMRANGEBYRANK', call:key('owners_dead'), 0, -DEAD_OWNERS_KEPT - 1)
    local requeued = hand_back(call, owner, true)
    changed(call, 'dead', name, string.format('{"requeued":%d}', requeued))
end

local function forget(call, name)
    offer(call, name, -1)
    redis.call('DEL', node_key(call, name))
    redis.call('SREM', call:key('nodes'), name)
    redis.call('ZREM', call:key('nodes_alive'), name)
end

local function report_fields(call, report, places, environments, images)
    return 'report', report, 'places', places, 'environments', environments, 'images', images,
        'seen', common.number(call.now), 'library', 'rollouts' .. SUFFIX
end

-- Record a heartbeat; return since when nodes have been able to report without a break. When Redis itself was away, all
-- of them were silent, and each must get its time to report again.
local function reporting_since(call, dead_after)
    local found = redis.call('HMGET', call:key('heartbeats'), 'last', 'since')
    local last, since = tonumber(found[1] or 0), tonumber(found[2] or 0)
    if call.now - last > dead_after / 2 then
        since = call.now
    end
    redis.call('HSET', call:key('heartbeats'), 'last', common.number(call.now), 'since', common.number(since))
    return since
end

-- Return '' for a node that has joined, or the owner of its name.
common.register('cluster_join', function(call, name, owner, replacing, dead_after, ...)
    local found = redis.call('HMGET', node_key(call, name), 'owner', 'state', 'seen')
    local holder, state = common.value(found[1]), common.value(found[2])
    if holder and holder ~= owner and state ~= 'dead' then
        if holder ~= replacing and tonumber(found[3]) + tonumber(dead_after) > call.now then
            return holder
        end
        declare_dead(call, name)
    end
    local is_new = holder ~= owner or state == 'dead'
    redis.call('ZREM', call:key('owners_dead'), owner)
    change(call, name, 'owner', owner, 'state', 'ready', report_fields(call, ...))
    redis.call('SADD', call:key('nodes'), name)
    redis.call('ZADD', call:key('nodes_alive'), common.number(call.now), name)
    redis.call('HSET', call:key('members'), owner, name)
    if is_new then
        changed(call, 'joined', name)
    end
    return ''
end)

-- Return for how many more milliseconds a lease until this time lasts.
local function left(call, until_time)
    return math.ceil(math.max(0, tonumber(common.value(until_time) or 0) - call.now) * 1000)
end

-- Return the names of all roles, each followed by for how many more milliseconds its leader has it.
local function leases(call)
    local found = {}
    for _, role in ipairs(redis.call('SMEMBERS', call:key('roles'))) do
        found[#found + 1] = role
        found[#found + 1] = left(call, redis.call('HGET', call:key('leader:' .. role), 'until'))
    end
    return found
end

-- Return {state, sums, names of nodes that are dead now, leases}; an empty state means: not a member.
common.register_freeing('cluster_heartbeat', function(call, owner, dead_after, report, places, environments, images)
    local name = redis.call('HGET', call:key('members'), owner)
    if not name then
        return {'', {}, {}, {}}
    end
    local known = redis.call('HMGET', node_key(call, name), 'places', 'environments', 'images', 'state')
    if known[1] == places and known[2] == environments and known[3] == images then
        redis.call('HSET', node_key(call, name), 'report', report, 'seen', common.number(call.now))
    else
        change(call, name, report_fields(call, report, places, environments, images))
    end
    redis.call('ZADD', call:key('nodes_alive'), common.number(call.now), name)
    local silent = {}
    if reporting_since(call, dead_after) <= call.now - dead_after then
        silent = redis.call('ZRANGEBYSCORE', call:key('nodes_alive'), '-inf', common.number(call.now - dead_after))
    end
    for _, other in ipairs(silent) do
        declare_dead(call, other)
    end
    idle.pass_on(call)
    return {known[4], redis.call('HGETALL', call:key('places')), silent, leases(call)}
end)

common.register_freeing('cluster_leave', function(call, owner)
    local name = redis.call('HGET', call:key('members'), owner)
    if not name then
        return 0
    end
    hand_back(call, owner, false)
    forget(call, name)
    changed(call, 'left', name)
    return 1
end)

-- Return {report, state, seconds of silence} of every node, by name.
common.register_read('cluster_nodes', function(call)
    local names, nodes = redis.call('SMEMBERS', call:key('nodes')), {}
    table.sort(names)
    for _, name in ipairs(names) do
        local found = redis.call('HMGET', node_key(call, name), 'report', 'state', 'seen')
        nodes[#nodes + 1] = {found[1], found[2], common.number(call.now - tonumber(found[3]))}
    end
    return nodes
end)

-- Return the names of the libraries whose functions the members call.
common.register_read('cluster_libraries', function(call)
    local found = {}
    for _, name in ipairs(redis.call('ZRANGE', call:key('nodes_alive'), 0, -1)) do
        found[#found + 1] = common.value(redis.call('HGET', node_key(call, name), 'library'))
    end
    return found
end)

-- Return the state that a node had, '' if there is no such node.
common.register_freeing('cluster_state', function(call, name, state)
    local had = common.value(redis.call('HGET', node_key(call, name), 'state'))
    if had and had ~= 'dead' and had ~= state then
        change(call, name, 'state', state)
        changed(call, state, name)
    end
    return had or ''
end)

-- Return the state that a node had, '' if there is no such node; only a dead one is removed.
common.register_freeing('cluster_remove', function(call, name)
    local had = common.value(redis.call('HGET', node_key(call, name), 'state'))
    if had == 'dead' then
        forget(call, name)
        changed(call, 'left', name)
    end
    return had or ''
end)

-- Return {owner, token, milliseconds left} of whoever leads a role now: the caller, if the role was free.
common.register_freeing('cluster_lead', function(call, role, owner, seconds)
    local key = call:key('leader:' .. role)
    local found = redis.call('HMGET', key, 'owner', 'token', 'until')
    local leader, token = common.value(found[1]), tonumber(common.value(found[2]) or 0)
    if cluster.is_dead(call, owner) then
        return {'', 0, 0}
    end
    if leader and leader ~= '' and leader ~= owner and tonumber(found[3]) > call.now then
        return {leader, token, left(call, found[3])}
    end
    if leader ~= owner then
        token = token + 1
        redis.call('SADD', call:key('roles'), role)
    end
    redis.call('HSET', key, 'owner', owner, 'token', token, 'until', common.number(call.now + seconds))
    return {owner, token, seconds * 1000}
end)

common.register_freeing('cluster_resign', function(call, role, owner)
    resign(call, role, owner)
    return 0
end)

-- Return {owner, token} of whoever leads a role now, or an empty owner.
common.register_read('cluster_leader', function(call, role)
    local found = redis.call('HMGET', call:key('leader:' .. role), 'owner', 'token', 'until')
    local owner = common.value(found[1])
    if not owner or owner == '' or tonumber(found[3]) <= call.now then
        return {'', 0}
    end
    return {owner, tonumber(found[2])}
end)
