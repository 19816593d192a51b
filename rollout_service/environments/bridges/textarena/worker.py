"""The part of the games' worker for TextArena; `games/worker.py` describes the calls.

Guarantee: a player sees the texts of the game and of the other player since its last move, without its own words.
"""

from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]
GAME = -1


def candidates(players: int) -> list[str]:
    """Return all games: it is seen when they begin which are for so many players."""
    _ = players
    from textarena.envs.registration import ENV_REGISTRY

    return [name for name in sorted(ENV_REGISTRY) if name.endswith("-v0")]


def begin(request: dict[str, Any]) -> tuple[Callable[[str], Reply], Reply]:
    """Begin a game; the reward is that of the player `seat`."""
    import textarena

    players = request["players"]
    env = textarena.make(request["game"], **request["options"])
    env.reset(num_players=players, seed=request["seed"])
    states = {1: textarena.SinglePlayerState, 2: textarena.TwoPlayerState}
    if not isinstance(env.state, states[players]):
        raise ValueError(f"{request['game']} is not a game for {players} of players")  # noqa: TRY004 - a wrong request
    if players == 1:
        put_in_order(env.state)
    game = _ArenaGame(env, players, request.get("seat") or 0)
    return game.step, game.news()


def put_in_order(state: Any) -> None:
    """Let a game say the reason and the reward of an illegal move in either order: some have them the wrong way round,
    and would end with a text as their reward.
    """
    own = state.set_invalid_move

    def set_invalid_move(reason: Any, reward: Any = -1.0) -> Any:
        return own(reward, reason) if isinstance(reward, str) else own(reason, reward)

    state.set_invalid_move = set_invalid_move


class _ArenaGame:
    def __init__(self, env: Any, players: int, seat: int) -> None:
        self._env, self._players, self._seat = env, players, seat
        self._seen = [0] * players

    def step(self, action: str) -> Reply:
        done, _ = self._env.step(action)
        return self._end() if done else self.news()

    def news(self) -> Reply:
        """Return what the player whose turn it is has not seen yet."""
        player, _ = self._env.get_observation()
        said = self._env.full_observations.get(player, [])
        news, self._seen[player] = said[self._seen[player] :], len(said)
        texts = [self._text(sender, str(message)) for sender, message, _ in news if sender != player]
        return {"text": "\n".join(texts), "player": player}

    def _text(self, sender: int, message: str) -> str:
        if sender == GAME:
            return message
        return f"[{self._env.state.role_mapping.get(sender, f'Player {sender}')}] {message}"

    def _end(self) -> Reply:
        rewards, info = self._env.close()
        own = info.get(self._seat, {})
        parts = {"invalid_move": float(bool(own.get("invalid_move")))}
        if self._players == 2:
            other = info.get(1 - self._seat, {})
            parts["opponent_invalid_move"] = float(bool(other.get("invalid_move")))
        reason = str(own.get("reason", ""))
        return {"text": reason, "done": True, "reward": float(rewards[self._seat]), "parts": parts}
