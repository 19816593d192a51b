"""axe-core on a page: what keeps people with a keyboard, a screen reader or weak eyes from using it."""

from functools import cache
from importlib.resources import files

from playwright.async_api import Page

RUN = """() => axe.run(document, {resultTypes: ["violations"]}).then(({violations}) =>
  violations.map(({id, impact, help, nodes}) => ({
    id, impact, help, where: nodes.map((node) => `${node.target.join(" ")}: ${node.failureSummary}`),
  })))"""


@cache
def _source() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text()


async def violations(page: Page) -> list[str]:
    """Return the serious and critical violations, with where they are."""
    await page.evaluate(_source())
    found = await page.evaluate(RUN)
    bad = [one for one in found if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {one['help']}: {where}" for one in bad for where in one["where"]]
