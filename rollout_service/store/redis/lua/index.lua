-- The index of rollouts: which of them have an environment, a run, the code of an error or a range of rewards, and the
-- ids in alphabetical order. A search reads it, and then the rollouts themselves: it may name some that do not match.
--
-- `bits:NAME:CHUNK` has a bit for each of `CHUNK` numbers of rollouts, and `bits:KIND` how many bits each name of a kind
-- has; a name is one of `e:ENVIRONMENT`, `R:RUN`, `k:CODE` and `w:RANGE`. `ids` has all ids. A rollout is entered and
-- removed in the call that changes it.

local index = {}

local CHUNK = 8192
local KINDS = {'e', 'R', 'k', 'w'}
local LOWEST, HIGHEST = -9, 10  -- the exponents of rewards between which there are four ranges for each

local function bits_key(call, kind, value, chunk)
    return call:key('bits:' .. kind .. ':' .. value .. ':' .. common.number(chunk))
end

-- Return the range of a reward, so that no range has a reward that is greater than one of a higher range.
local function range_of(reward)
    local value = tonumber(reward)
    if value == 0 then
        return 0
    end
    local fraction, exponent = math.frexp(math.abs(value))
    local range = 2 + 4 * (exponent - LOWEST) + math.floor((fraction - 0.5) * 8)
    range = math.max(1, math.min(range, 2 + 4 * (HIGHEST + 1 - LOWEST)))
    return value > 0 and range or -range
end

local function add(call, kind, value, number)
    local key = bits_key(call, kind, value, math.floor(number / CHUNK))
    if redis.call('SETBIT', key, number % CHUNK, 1) == 0 then
        redis.call('HINCRBY', call:key('bits:' .. kind), value, 1)
    end
end

local function remove(call, kind, value, number)
    local key, offset = bits_key(call, kind, value, math.floor(number / CHUNK)), number % CHUNK
    if redis.call('GETBIT', key, offset) == 0 then
        return
    end
    redis.call('SETBIT', key, offset, 0)
    if redis.call('BITCOUNT', key) == 0 then
        redis.call('UNLINK', key)
    end
    if redis.call('HINCRBY', call:key('bits:' .. kind), value, -1) == 0 then
        redis.call('HDEL', call:key('bits:' .. kind), value)
    end
end

-- -- changes --------------------------------------------------------------------

-- Enter a new rollout; `run` is nil for one of no run.
function index.enter(call, id, number, environment, run)
    add(call, 'e', environment, number)
    if run then
        add(call, 'R', run, number)
    end
    redis.call('ZADD', call:key('ids'), 0, id)
end

-- Enter the code of the error of a rollout, nil for none, instead of what the rollout has; return its number, and whether
-- the code differs.
local function enter_code(call, id, code)
    local number, before = unpack(redis.call('HMGET', call:key('r:' .. id), 'n', 'k'))
    number, before = tonumber(number), common.value(before)
    if before and before ~= code then
        remove(call, 'k', before, number)
    end
    if code and before ~= code then
        add(call, 'k', code, number)
    end
    return number, before ~= code
end

-- Write and enter the code of the error of a rollout, nil for none.
function index.set_code(call, id, code)
    local _, differs = enter_code(call, id, code)
    if differs and code then
        redis.call('HSET', call:key('r:' .. id), 'k', code)
    elseif differs then
        redis.call('HDEL', call:key('r:' .. id), 'k')
    end
end

-- Enter the code and the reward of a rollout that ends, before they are written; nil for none.
function index.enter_outcome(call, id, code, reward)
    local number = enter_code(call, id, code)
    if reward then
        add(call, 'w', range_of(reward), number)
    end
end

-- Remove the reward of a rollout that still has it.
function index.remove_reward(call, id)
    local number, reward = unpack(redis.call('HMGET', call:key('r:' .. id), 'n', 'w'))
    if common.value(reward) then
        remove(call, 'w', range_of(reward), tonumber(number))
    end
end

-- Remove a rollout that is still there.
function index.remove(call, id)
    local found = redis.call('HMGET', call:key('r:' .. id), 'n', unpack(KINDS))
    local number = tonumber(found[1])
    for place, kind in ipairs(KINDS) do
        local value = found[place + 1]
        if value then
            remove(call, kind, kind == 'w' and range_of(value) or value, number)
        end
    end
    redis.call('ZREM', call:key('ids'), id)
end

-- -- searches -------------------------------------------------------------------

local function ids_between(text)
    return '[' .. text, '(' .. text .. '\127'  -- ids have no character beyond
end

-- Return the run of all rollouts whose ids begin as this text does up to its first dot, nil if they are not of one run.
local function run_of(call, text)
    local run = string.match(text, '^([^.]+)%.')
    if run then
        local rollouts = redis.call('ZLEXCOUNT', call:key('ids'), ids_between(run .. '.'))
        return rollouts == tonumber(redis.call('HGET', call:key('bits:R'), run)) and run or nil
    end
end

-- Return the ranges of rewards that a rollout may have which `filter` asks for, and how many rollouts have one of them.
local function ranges(call, filter)
    local low = filter.reward_min and range_of(filter.reward_min) or -math.huge
    local high = filter.reward_max and range_of(filter.reward_max) or math.huge
    local values, sum, found = {}, 0, redis.call('HGETALL', call:key('bits:w'))
    for place = 1, #found, 2 do
        if tonumber(found[place]) >= low and tonumber(found[place]) <= high then
            table.insert(values, found[place])
            sum = sum + tonumber(found[place + 1])
        end
    end
    return values, sum
end

-- Return lists of names of bits, of each of which a rollout that `filter` asks for has one, and the most rollouts there
-- can be.
function index.names(call, filter)
    local lists, most = {}, math.huge
    local function narrow(kind, values, sum)
        for place, value in ipairs(values) do
            values[place] = 'bits:' .. kind .. ':' .. value
        end
        table.insert(lists, values)
        most = math.min(most, sum)
    end
    local run = filter.run or (filter.text and run_of(call, filter.text))
    for kind, value in pairs({e = filter.environment, R = run, k = filter.code}) do
        narrow(kind, {value}, tonumber(redis.call('HGET', call:key('bits:' .. kind), value) or 0))
    end
    if filter.reward_min or filter.reward_max then
        narrow('w', ranges(call, filter))
    end
    return lists, most
end

-- Return the ids that begin with a text if there are no more than `most` of them, else nil.
function index.ids(call, text, most)
    local first, last = ids_between(text)
    if redis.call('ZLEXCOUNT', call:key('ids'), first, last) <= most then
        return redis.call('ZRANGEBYLEX', call:key('ids'), first, last)
    end
end
