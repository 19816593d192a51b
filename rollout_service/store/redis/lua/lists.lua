-- Lists of rollouts: short rows, found by going through the numbers or ids that the index gives or, if it gives none,
-- through the states' sorted sets, in the order of the rollouts' numbers.

-- What a row has, by the short names of `rollouts.lua`.
local FIELDS = {'n', 's', 'a', 'p', 'e', 'R', 'G', 'w', 'S', 'k', 'C', 'H', 'T', 'N', 'W', 'b'}
local PAGE = 128  -- how many numbers of a state are read at once

-- Return a function that tells whether a rollout that exists is what `filter` asks for. It reads only the fields that
-- the answer depends on: a search looks at many rollouts that are not.
local function new_test(call, filter)
    local fields, checks = {}, {}
    local function require(field, given, check)
        if given ~= nil then
            table.insert(fields, field)
            table.insert(checks, check)
        end
    end
    local states = filter.states and common.set_of(filter.states)
    require('s', states, function(value) return states[value] end)
    require('e', filter.environment, function(value) return value == filter.environment end)
    require('R', filter.run, function(value) return value == filter.run end)
    require('G', filter.group, function(value) return tonumber(value) == filter.group end)
    require('k', filter.code, function(value) return value == filter.code end)
    require('w', filter.reward_min, function(value) return tonumber(value) >= filter.reward_min end)
    require('w', filter.reward_max, function(value) return tonumber(value) <= filter.reward_max end)
    require('C', filter.from, function(value) return tonumber(value) >= filter.from end)
    require('C', filter.till, function(value) return tonumber(value) < filter.till end)
    return function(id)
        if filter.text and string.sub(id, 1, #filter.text) ~= filter.text then
            return false
        end
        local values = #fields > 0 and redis.call('HMGET', call:key('r:' .. id), unpack(fields)) or {}
        for index, check in ipairs(checks) do
            if not values[index] or not check(values[index]) then
                return false
            end
        end
        return true
    end
end

-- Return the number of about the first rollout of a sorted set that was submitted at a time or later, nil if none was,
-- and the number of the last one before.
local function number_at(call, key, time)
    local low, high = 0, redis.call('ZCARD', key)
    while low < high do
        local middle = math.floor((low + high) / 2)
        local id = redis.call('ZRANGE', key, middle, middle)[1]
        if tonumber(redis.call('HGET', call:key('r:' .. id), 'C')) >= time then
            high = middle
        else
            low = middle + 1
        end
    end
    local before = low > 0 and redis.call('ZRANGE', key, low - 1, low - 1, 'WITHSCORES')[2] or 0
    return tonumber(redis.call('ZRANGE', key, low, low, 'WITHSCORES')[2]), tonumber(before)
end

-- Return a function that gives the numbers and ids of one state in order, and then nil.
local function walk(call, state, newest, low, high)
    local key, page, at = call:key('state:' .. state), {}, 1
    return function()
        if at > #page then
            if newest then
                page = redis.call('ZREVRANGEBYSCORE', key, high, low, 'WITHSCORES', 'LIMIT', 0, PAGE)
                high = '(' .. (page[#page] or high)
            else
                page = redis.call('ZRANGEBYSCORE', key, low, high, 'WITHSCORES', 'LIMIT', 0, PAGE)
                low = '(' .. (page[#page] or low)
            end
            at = 1
        end
        local id, number = page[at], tonumber(page[at + 1])
        at = at + 2
        return number, id
    end
end

-- Return a function that gives the numbers and ids of several states in order, and then nil.
local function merge(call, states, newest, low, high)
    local walks = {}
    for index, state in ipairs(states) do
        local next = walk(call, state, newest, low, high)
        local number, id = next()
        walks[index] = {next = next, number = number, id = id}
    end
    return function()
        local best
        for _, one in ipairs(walks) do
            if one.number and (not best or (newest and one.number > best.number)
                or (not newest and one.number < best.number)) then
                best = one
            end
        end
        if not best then
            return nil
        end
        local number, id = best.number, best.id
        best.number, best.id = best.next()
        return number, id
    end
end

-- Return a function that gives the numbers and ids of these rollouts in order, and then nil.
local function sorted(call, ids, newest, low, high)
    local found, at = {}, 0
    for _, id in ipairs(ids) do
        local number = tonumber(redis.call('HGET', call:key('r:' .. id), 'n') or nil)
        if number and number >= tonumber(low) and number <= tonumber(high) then
            table.insert(found, {number = number, id = id})
        end
    end
    table.sort(found, function(one, other)
        if newest then
            return one.number > other.number
        end
        return one.number < other.number
    end)
    return function()
        at = at + 1
        if found[at] then
            return found[at].number, found[at].id
        end
    end
end

-- Return a function that gives those of these numbers which rollouts in these states have, with their ids, and then nil.
local function numbered(call, numbers, states)
    local at = 0
    return function()
        while at < #numbers do
            at = at + 1
            for _, state in ipairs(states) do
                local number = numbers[at]
                local id = redis.call('ZRANGEBYSCORE', call:key('state:' .. state), number, number)[1]
                if id then
                    return number, id
                end
            end
        end
    end
end

-- Return the number of about the first rollout in these states that was submitted at a time or later, and that of about
-- the last one before.
local function around(call, states, time)
    local first, last = math.huge, 0
    for _, state in ipairs(states) do
        local number, before = number_at(call, call:key('state:' .. state), time)
        first, last = math.min(first, number or math.huge), math.max(last, before)
    end
    return first, last
end

-- Return the numbers between which rollouts were submitted within the times of `filter`.
local function narrow(call, filter, states, low, high)
    if filter.after then
        low = math.max(low, (around(call, states, filter.after)))
    end
    if filter.before then
        high = math.min(high, (select(2, around(call, states, filter.before))))
    end
    return low, high
end

-- Return how a search between two numbers is to be made: {low, high, ids, lists of names of bits}. The ids are nil if they
-- are not few, and there are no lists if going through the states is as good. Return an empty list if nothing can match.
common.register_read('lists_plan', function(call, search, low, high, few)
    search = cjson.decode(search)
    low, high = narrow(call, search.filter, search.states, tonumber(low), tonumber(high))
    local lists, most = index.names(call, search.filter)
    local ids = search.filter.text and index.ids(call, search.filter.text, tonumber(few))
    if most == 0 or (ids and #ids == 0) then
        return {}
    end
    local in_states, first, last = 0, math.huge, 0
    for _, state in ipairs(search.states) do
        local key = call:key('state:' .. state)
        in_states = in_states + redis.call('ZCARD', key)
        first = math.min(first, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or math.huge))
        last = math.max(last, tonumber(redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] or 0))
    end
    low, high = math.max(low, first), math.min(high, last)
    if low > high then
        return {}
    end
    return {common.number(low), common.number(high), ids or false, most <= in_states and lists or {}}
end)

-- Return {rows, the number after which to go on or an empty text if nothing is left}. `search` is what to look for, among
-- its `ids` or `numbers` if it has them, `low` and `high` the first and the last number, `budget` the most rollouts to
-- look at and `wanted` to return.
common.register_read('lists_summaries', function(call, search, low, high, budget, wanted)
    search = cjson.decode(search)
    local newest, test, next = search.newest, new_test(call, search.filter), nil
    budget, wanted = tonumber(budget), tonumber(wanted)
    if search.ids then
        next = sorted(call, search.ids, newest, low, high)
    elseif search.numbers then
        next = numbered(call, search.numbers, search.states)
    else
        next = merge(call, search.states, newest, low, high)
    end
    local rows, last = {}, ''
    for _ = 1, budget do
        local number, id = next()
        if not number then
            return {rows, ''}
        end
        if test(id) then
            if #rows == wanted then
                return {rows, last}
            end
            table.insert(rows, {id, redis.call('HMGET', call:key('r:' .. id), unpack(FIELDS))})
        end
        last = common.number(number)
    end
    return {rows, last}
end)
