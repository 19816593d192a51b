"""Events: those of the service itself, and the streams that readers follow."""

from rollout_service.server.events.announcer import Announcer as Announcer
from rollout_service.server.events.selection import EventSelection as EventSelection
from rollout_service.server.events.tail import EventTail as EventTail
from rollout_service.server.events.watcher import StateWatcher as StateWatcher
