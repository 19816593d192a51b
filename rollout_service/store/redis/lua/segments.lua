-- The ledger of segment files: which are open, and how many records of each are referenced.
--
-- Keys: `segments:owners` has the owner of each open file, `segments:live` the number of references to each file, and
-- `segments:garbage` the files to be deleted.

local segments = {}

local MARK = '@'  -- what begins with this byte is a reference, no encoded trajectory does

-- Return the file and the length that a stored text refers to, nil if it is not a reference.
local function parse(stored)
    if string.sub(stored, 1, 1) ~= MARK then
        return nil
    end
    local file, length = string.match(stored, '^@([^:]+):%d+:(%d+):')
    return file, tonumber(length)
end

local function discard_if_unused(call, file)
    local live = tonumber(common.value(redis.call('HGET', call:key('segments:live'), file)) or 0)
    if live <= 0 and redis.call('HEXISTS', call:key('segments:owners'), file) == 0 then
        redis.call('HDEL', call:key('segments:live'), file)
        redis.call('SADD', call:key('segments:garbage'), file)
    end
end

-- Return the length of what is stored: that of the record if it is a reference.
function segments.size(stored)
    local _, length = parse(stored)
    return length or #stored
end

-- Count a reference that is about to be stored; return whether its file is open. Anything else needs no count.
function segments.add(call, stored)
    local file = parse(stored)
    if not file then
        return true
    end
    if redis.call('HEXISTS', call:key('segments:owners'), file) == 0 then
        return false
    end
    redis.call('HINCRBY', call:key('segments:live'), file, 1)
    return true
end

-- Stop counting a reference that is about to be deleted; `stored` may be any value that GET returns.
function segments.drop(call, stored)
    local file = parse(stored or '')
    if file and redis.call('HEXISTS', call:key('segments:live'), file) == 1 then
        redis.call('HINCRBY', call:key('segments:live'), file, -1)
        discard_if_unused(call, file)
    end
end

-- Return the random id of the store, and the mark of its folder, '' without one; the proposals are used if there is none.
common.register('segments_mark', function(call, id, mark)
    local key = call:key('segments:mark')
    redis.call('HSETNX', key, 'id', id)
    if mark ~= '' then
        redis.call('HSETNX', key, 'mark', mark)
    end
    return {redis.call('HGET', key, 'id'), common.value(redis.call('HGET', key, 'mark')) or ''}
end)

common.register('segments_register', function(call, file, owner)
    redis.call('HSET', call:key('segments:owners'), file, owner)
    redis.call('HSETNX', call:key('segments:live'), file, 0)
    return 1
end)

common.register_freeing('segments_seal', function(call, ...)
    for _, file in ipairs({...}) do
        if redis.call('HDEL', call:key('segments:owners'), file) == 1 then
            discard_if_unused(call, file)
        end
    end
    return 1
end)

-- Return the open files whose owner is no member of the cluster; a member writes its first file after it has joined.
common.register_read('segments_orphans', function(call)
    local owners, orphans = redis.call('HGETALL', call:key('segments:owners')), {}
    for index = 1, #owners, 2 do
        if redis.call('HEXISTS', call:key('members'), owners[index + 1]) == 0 then
            table.insert(orphans, owners[index])
        end
    end
    return orphans
end)

-- Forget the folder, so that the next service that starts marks another, and seal all files: no reference to one of them is
-- accepted any more, whoever still sees the folder.
common.register_freeing('segments_begin_again', function(call)
    for _, file in ipairs(redis.call('HKEYS', call:key('segments:owners'))) do
        redis.call('HDEL', call:key('segments:owners'), file)
        discard_if_unused(call, file)
    end
    redis.call('HDEL', call:key('segments:mark'), 'mark')
    return 1
end)

common.register_freeing('segments_forget', function(call, ...)
    return redis.call('SREM', call:key('segments:garbage'), ...)
end)

common.register_read('segments_unknown', function(call, ...)
    local unknown = {}
    for _, file in ipairs({...}) do
        if redis.call('HEXISTS', call:key('segments:live'), file) == 0
            and redis.call('SISMEMBER', call:key('segments:garbage'), file) == 0 then
            table.insert(unknown, file)
        end
    end
    return unknown
end)
