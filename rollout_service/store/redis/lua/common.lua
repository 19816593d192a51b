-- What the functions of all files share: how they are registered, keys, the clock, and events.
--
-- A function gets a call and its own arguments, all of them strings. `call.now` is the time in Unix seconds: Redis's own,
-- or the caller's in a test that moves its clock by itself. Every key begins with the root of the store, its only KEYS[1].

local common = {}

local EVENTS_KEPT = 100000  -- about; the oldest events are deleted

local Call = {}
Call.__index = Call

-- Return the full name of a key.
function Call:key(name)
    return self.root .. ':' .. name
end

-- Return the id of the newest event, 0 if there is none.
function Call:newest()
    if not self.newest_event then
        local last = redis.call('XREVRANGE', self:key('events'), '+', '-', 'COUNT', 1)[1]
        self.newest_event = last and tonumber(string.match(last[1], '^%d+')) or 0
    end
    return self.newest_event
end

-- Tell those who subscribe to a topic; return how many there are.
function Call:publish(topic, message)
    return redis.call('SPUBLISH', self:key('topic:' .. topic), message)
end

-- By the first word of an event's kind, the topic that has it.
local TOPICS = {
    node = 'cluster', backend = 'cluster', pool = 'cluster', run = 'runs', group = 'runs', batch = 'runs',
}

-- Append an event, and publish it on its topics; `data` is the text of a JSON object. Return the event's id.
function Call:event(kind, subject, data)
    local id = self:newest() + 1
    redis.call('XADD', self:key('events'), 'MAXLEN', '~', EVENTS_KEPT, string.format('%d-0', id),
        'k', kind, 's', subject, 't', common.number(self.now), 'd', data)
    self.newest_event = id
    self:publish('events', id)
    local topic = TOPICS[string.match(kind, '^%a+')]
    if topic then
        self:publish(topic, kind .. ' ' .. id)
    end
    if topic == 'runs' and kind ~= 'batch.leased' then
        self:publish('run:' .. string.match(subject, '^[^.]*'), id)  -- ids of groups and batches begin with it
    end
    return id
end

-- Return a number as text that loses nothing: Lua's own has only 14 digits.
function common.number(value)
    return string.format('%.17g', value)
end

-- Return the time of Redis's clock in Unix seconds.
function common.clock()
    local time = redis.call('TIME')
    return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- Return the value of a field of Redis, or nil if there is none: Redis says false.
function common.value(found)
    if found == false then
        return nil
    end
    return found
end

-- Return a table in which each of these names is true.
function common.set_of(names)
    local found = {}
    for _, name in ipairs(names) do
        found[name] = true
    end
    return found
end

local function register(name, body, flags)
    redis.register_function{
        function_name = name .. SUFFIX,
        flags = flags,
        callback = function(keys, args)
            local now = args[1] ~= '' and tonumber(args[1]) or common.clock()
            return body(setmetatable({root = keys[1], now = now}, Call), unpack(args, 2))
        end,
    }
end

-- Register a function that writes; Redis refuses it when its memory is full.
function common.register(name, body)
    register(name, body, {})
end

-- Register a function that only reads.
function common.register_read(name, body)
    register(name, body, {'no-writes'})
end

-- Register a function that may write although the memory is full: it frees memory, or writes so little that work goes on
-- and can end.
function common.register_freeing(name, body)
    register(name, body, {'allow-oom'})
end
