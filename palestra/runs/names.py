"""Names for runs that were given none: two words that people can say and remember."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

FIRST = """
able amber ample apt azure bold brave bright brisk broad calm candid civil clean clear clever cool coral cosy crisp
curious daring dapper deft direct eager early earnest easy even fair fancy fine firm fleet fond frank free fresh gentle
glad golden good grand great green happy hardy hearty honest humble jolly jovial keen kind lively loyal lucid lucky
mellow merry mild modest neat nimble noble novel olive patient placid plain plucky polite prime proud quick quiet rapid
ready robust rosy royal scarlet serene sharp silver simple sleek smart smooth snug solid spry stable steady still
sturdy subtle sunny sure swift tender tidy tranquil trusty upbeat vivid warm whole wise witty
"""
SECOND = """
acorn alder apple aspen badger bamboo basil beacon beaver birch bison brook canyon cedar cherry cloud clover comet
condor cove crane creek cricket cypress dahlia dolphin dune eagle ember falcon fern finch fjord forest fox garnet gecko
glacier grove harbor hare hazel heron hill ibis iris island ivy jade jasper juniper kestrel kiwi lagoon lake lark
laurel lemon lilac lily linden lotus lynx maple marble marten meadow meteor mint moss nectar oak oasis ocean opal
orchid osprey otter owl panda peach pearl pebble pepper pine planet plum poplar prairie puffin quail quartz raven reef
ridge river robin rowan saffron sage seal shore sparrow spruce star stone swan thistle tiger trout tulip valley violet
walnut willow wren zebra
"""
TRIES = 100


def drawn_names() -> Iterator[str]:
    """Names to try, drawn at random: "calm-otter"; after many in vain with a number behind them."""
    first, second = FIRST.split(), SECOND.split()
    for number in range(10 * TRIES):
        name = f"{secrets.choice(first)}-{secrets.choice(second)}"
        yield name if number < TRIES else f"{name}-{secrets.randbelow(10**6)}"


def free_name(root: Path) -> str:
    """Two words that name nothing in the folder yet."""
    return next(name for name in drawn_names() if not (root / name).exists())
