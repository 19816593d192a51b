-- Owners that wait for work: a rollout that is queued wakes one of them, and not all.
--
-- `idle` has the class of each owner that waits, `idle:classes` the classes, and `idle:CLASS` the owners of one; a class is
-- the pools and the waits of a claim. An owner waits from a claim that found too little until it is woken or claims again.
-- Each queued rollout wakes one that it suits. Who is woken may not take it, so a claim that leaves ready rollouts wakes
-- another for them; who has ended is not subscribed, and is passed over. `woken` has those that have not claimed since.
-- `wakes` numbers the wake-ups, so that a claim can tell which of them it came after.

local idle = {}

local WAKE_SECONDS = 1  -- by when who was woken has claimed
local CLASSES_KEPT = 1000

local filters, filters_kept = {}, 0

-- What a claim may take: `wait(pool, environment)` is for how long a rollout must have been queued, nil if it does not suit.
function idle.filter(pools, waits)
    local class = pools .. '\0' .. waits
    if filters[class] then
        return filters[class], class
    end
    local filter = {pools = pools ~= '' and common.set_of(cjson.decode(pools)), waits = waits ~= '' and cjson.decode(waits)}
    function filter.wait(pool, environment)
        if filter.pools and not filter.pools[pool] then
            return nil
        end
        if not filter.waits then
            return 0
        end
        return filter.waits[environment]
    end
    if filters_kept >= CLASSES_KEPT then
        filters, filters_kept = {}, 0
    end
    filters[class], filters_kept = filter, filters_kept + 1
    return filter, class
end

local function filter_of(class)
    return filters[class] or (idle.filter(string.match(class, '^(.-)%z(.*)$')))
end

-- Return the number of the latest wake-up.
function idle.latest(call)
    return tonumber(common.value(redis.call('GET', call:key('wakes'))) or 0)
end

-- Note that an owner does not wait, since it claims, or is gone.
function idle.leave(call, owner)
    local class = common.value(redis.call('HGET', call:key('idle'), owner))
    redis.call('ZREM', call:key('woken'), owner)
    if not class then
        return
    end
    redis.call('HDEL', call:key('idle'), owner)
    redis.call('SREM', call:key('idle:' .. class), owner)
    if redis.call('EXISTS', call:key('idle:' .. class)) == 0 then
        redis.call('SREM', call:key('idle:classes'), class)
    end
end

-- Note that an owner waits for what suits a class.
function idle.enter(call, owner, class)
    redis.call('HSET', call:key('idle'), owner, class)
    redis.call('SADD', call:key('idle:' .. class), owner)
    redis.call('SADD', call:key('idle:classes'), class)
end

-- Return the class that suits a queue with the shortest wait of at most `longest`, nil if there is none.
local function best_class(call, pool, environment, longest)
    local best, shortest
    for _, class in ipairs(redis.call('SMEMBERS', call:key('idle:classes'))) do
        local wait = filter_of(class).wait(pool, environment)
        if wait and wait <= longest and (not best or wait < shortest) then
            best, shortest = class, wait
        end
    end
    return best
end

-- Wake one owner that a rollout of this queue suits, once it has waited up to `longest` seconds.
function idle.wake(call, pool, environment, longest)
    while true do
        local class = best_class(call, pool, environment, longest)
        if not class then
            return
        end
        local owner = common.value(redis.call('SPOP', call:key('idle:' .. class)))
        if not owner then
            redis.call('SREM', call:key('idle:classes'), class)
        else
            redis.call('HDEL', call:key('idle'), owner)
            if call:publish('owner:' .. owner, 'work ' .. redis.call('INCR', call:key('wakes'))) > 0 then
                redis.call('ZADD', call:key('woken'), common.number(call.now), owner)
                return
            end
        end
    end
end

-- Wake one owner for each queue with ready rollouts that suits one that waits.
function idle.offer(call)
    if redis.call('EXISTS', call:key('idle:classes')) == 0 then
        return
    end
    for _, queue in ipairs(redis.call('SMEMBERS', call:key('queues'))) do
        local oldest = redis.call('ZRANGE', call:key('since:' .. queue), 0, 0, 'WITHSCORES')[2]
        if oldest then
            local pool, environment = string.match(queue, '^(.-)%z(.*)$')
            idle.wake(call, pool, environment, call.now - tonumber(oldest))
        end
    end
end

-- Wake others for those that were woken and have not claimed.
function idle.pass_on(call)
    local late = common.number(call.now - WAKE_SECONDS)
    if redis.call('ZREMRANGEBYSCORE', call:key('woken'), '-inf', late) > 0 then
        idle.offer(call)
    end
end
