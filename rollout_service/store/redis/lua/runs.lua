-- Runs: records of one moment, and changes that apply only if nobody else has changed the run.
--
-- What a change writes is decided outside, by the rules that all stores share; it comes as a list of commands, packed
-- by MessagePack. A command is one of Redis's, or one of `writes`.

local writes = {}

function writes.event(call, kind, subject, data)
    call:event(kind, subject, data)
end

-- Put a new run at the end of the lists of all runs and of active ones, and note that its rollouts come after all that
-- there are.
function writes.enlist(call, run)
    local number = redis.call('INCR', call:key('runs:last'))
    redis.call('ZADD', call:key('runs'), number, run)
    redis.call('ZADD', call:key('runs:active'), number, run)
    redis.call('HSET', call:key('run:' .. run), 'rollouts_after', redis.call('GET', call:key('rollouts:last')) or 0)
end

-- Take a run off the list of active ones, and note that it has no later rollouts.
function writes.retire(call, run)
    redis.call('ZREM', call:key('runs:active'), run)
    redis.call('HSET', call:key('run:' .. run), 'rollouts_until', redis.call('GET', call:key('rollouts:last')) or 0)
end

-- Queue a rollout of a group.
function writes.submit(call, id, fingerprint, pool, request, run, number)
    rollouts.submit(call, {
        id = id, fingerprint = fingerprint, pool = pool, request = request, run = run, group = number,
    })
end

-- Delete the trajectory of a rollout.
function writes.forget(call, id)
    rollouts.forget(call, id)
end

-- Erase what a rollout that has ended contains.
function writes.erase(call, id, result)
    rollouts.erase(call, id, result)
end

-- Delete a rollout that has ended.
function writes.delete(call, id)
    rollouts.delete(call, id)
end

-- Return the time, and the answers to commands that only read.
common.register_read('runs_read', function(call, packed)
    local answer = {common.number(call.now)}
    for index, command in ipairs(cmsgpack.unpack(packed)) do
        answer[index + 1] = redis.call(unpack(command))
    end
    return answer
end)

-- Return the id of the first rollout to submit that exists with a different request, nil if there is none.
local function find_conflict(call, commands)
    for _, command in ipairs(commands) do
        if command[1] == 'submit' and rollouts.conflicts(call, command[2], command[3]) then
            return command[2]
        end
    end
end

-- Return whether an owner leads a role, by its token. Also one whose time is over leads until another takes the role.
local function leads(call, role, owner, token)
    local found = redis.call('HMGET', call:key('leader:' .. role), 'owner', 'token')
    return found[1] == owner and found[2] == token
end

-- Apply the commands if the run has this revision, which is empty for a run that is not stored, and if the owner leads
-- the role, if one is given. Return {outcome, detail}.
local function commit(call, run, revision, role, owner, token, packed)
    if role ~= '' and not leads(call, role, owner, token) then
        return {'led', ''}
    end
    local key = call:key('run:' .. run)
    if (common.value(redis.call('HGET', key, 'revision')) or '') ~= revision then
        return {'changed', ''}
    end
    local commands = cmsgpack.unpack(packed)
    local conflict = find_conflict(call, commands)
    if conflict then
        return {'taken', conflict}
    end
    for _, command in ipairs(commands) do
        local write = writes[command[1]]
        if write then
            write(call, unpack(command, 2))
        else
            redis.call(unpack(command))
        end
    end
    if redis.call('EXISTS', key) == 1 then
        redis.call('HSET', key, 'revision', redis.call('INCR', call:key('runs:revision')))
    end
    return {'done', ''}
end

common.register('runs_commit', commit)
common.register_freeing('runs_drain', commit)
