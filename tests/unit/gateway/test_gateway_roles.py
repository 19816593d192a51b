"""System and developer messages in the roles that chat formats allow."""

from rollout_service.gateway.contract import ClientMessage, map_roles

USER, ANSWER = ClientMessage("user", "u"), ClientMessage("assistant", "a")


def test_leading_instructions_are_joined():
    leading = [
        ClientMessage("system", "one"),
        ClientMessage("developer", ""),
        ClientMessage("developer", "two"),
    ]
    assert map_roles([*leading, USER]) == (ClientMessage("system", "one\n\ntwo"), USER)


def test_later_instructions_are_user_messages():
    mapped = map_roles([USER, ANSWER, ClientMessage("system", "three")])
    assert mapped == (USER, ANSWER, ClientMessage("user", "<system>\nthree\n</system>"))


def test_a_history_without_instructions_is_unchanged():
    assert map_roles([USER, ANSWER]) == (USER, ANSWER)
    assert map_roles([]) == ()
