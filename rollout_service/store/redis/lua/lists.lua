-- Lists of rollouts: short rows, found by going through the states' sorted sets in the order of the rollouts' numbers.

-- What a row has, by the short names of `rollouts.lua`, and the places of what is searched.
local FIELDS = {'n', 's', 'a', 'p', 'e', 'R', 'G', 'w', 'S', 'k', 'C', 'H', 'T', 'N', 'W'}
local STATE, ENVIRONMENT, RUN, GROUP, REWARD, CODE, CREATED, TURNS = 2, 5, 6, 7, 8, 10, 11, 13
local PAGE = 128  -- how many numbers of a state are read at once

local function set_of(names)
    local found = {}
    for _, name in ipairs(names) do
        found[name] = true
    end
    return found
end

local function is_within(value, low, high)
    return value and (not low or tonumber(value) >= low) and (not high or tonumber(value) <= high)
end

-- Return whether a rollout is what `filter` asks for.
local function matches(filter, id, row)
    return (not filter.states or filter.states[row[STATE]])
        and (not filter.text or string.sub(id, 1, #filter.text) == filter.text)
        and (not filter.environment or row[ENVIRONMENT] == filter.environment)
        and (not filter.run or row[RUN] == filter.run)
        and (not filter.group or tonumber(row[GROUP] or -1) == filter.group)
        and (not filter.code or row[CODE] == filter.code)
        and (not (filter.reward_min or filter.reward_max)
            or is_within(row[REWARD], filter.reward_min, filter.reward_max))
        and (not filter.from or tonumber(row[CREATED]) >= filter.from)
        and (not filter.till or tonumber(row[CREATED]) < filter.till)
end

-- Return the number of about the first rollout of a sorted set that was submitted at a time or later, nil if none was.
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
    return tonumber(redis.call('ZRANGE', key, low, low, 'WITHSCORES')[2])
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

-- Return the numbers between which rollouts were submitted within the times of `filter`.
local function narrow(call, filter, states, low, high)
    local first, last = nil, 0
    for _, state in ipairs(states) do
        local key = call:key('state:' .. state)
        local number = filter.after and number_at(call, key, filter.after)
        first = number and math.min(first or number, number) or first
        number = filter.before and number_at(call, key, filter.before) or math.huge
        last = math.max(last, number)
    end
    if filter.after then
        low = math.max(low, first or math.huge)
    end
    return low, filter.before and math.min(high, last) or high
end

-- Return {rows, the number after which to go on or an empty text if nothing is left}. `search` is what to look for, `low`
-- and `high` the first and the last number, `budget` the most rollouts to look at and `wanted` to return.
common.register_read('lists_summaries', function(call, search, low, high, budget, wanted)
    search = cjson.decode(search)
    local filter, states, newest = search.filter, search.states, search.newest
    filter.states = filter.states and set_of(filter.states)
    budget, wanted = tonumber(budget), tonumber(wanted)
    if not search.ids then
        low, high = narrow(call, filter, states, tonumber(low), tonumber(high))
        low, high = common.number(low), common.number(high)
    end
    local next = search.ids and sorted(call, search.ids, newest, low, high) or merge(call, states, newest, low, high)
    local rows, last = {}, ''
    for _ = 1, budget do
        local number, id = next()
        if not number then
            return {rows, ''}
        end
        local row = redis.call('HMGET', call:key('r:' .. id), unpack(FIELDS))
        if row[STATE] and matches(filter, id, row) then
            if #rows == wanted then
                return {rows, last}
            end
            local result = not row[TURNS] and redis.call('GET', call:key('x:' .. id))
            table.insert(rows, {id, row, result})
        end
        last = common.number(number)
    end
    return {rows, last}
end)
