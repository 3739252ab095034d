"""The text that `moonpool demo` asks about, written for it: over 1,000 tokens of plain English."""

from __future__ import annotations

TITLE = "Why the sea rises and falls"

QUESTION = "What causes the tides? Answer in a few sentences."

TEXT = """\
Why the sea rises and falls

Anyone who spends a day at the coast can see that the sea does not stay where it is. In the morning the \
water may stand at the foot of the dunes, and children must play on a narrow strip of sand. Six hours \
later the same water has gone far out, and where it stood there is a wide wet beach with pools, stones and \
small crabs. Six hours after that it is back again. This rising and falling of the sea is called the tide. \
When the water is highest we speak of high tide, and when it is lowest we speak of low tide.

People who lived by the sea knew the tides long before they could explain them. Fishermen knew when they \
could leave the harbour and when they could come home. They also noticed something strange: the tides \
seemed to follow the Moon. Each day the Moon rises about fifty minutes later than on the day before, and \
each day high tide comes about fifty minutes later too. When the Moon was full or new, the water rose \
higher than usual. Many people thought that the Moon must be the cause, but nobody could say how a light \
in the sky could move an ocean.

The answer came in the year 1687, when Isaac Newton published his book about gravity. Gravity is a force by \
which all things that have mass pull on each other. The Earth pulls on an apple, and the apple falls. The \
Earth pulls on the Moon, and the Moon stays in its orbit. But the Moon also pulls on the Earth, and on \
everything that lies on the Earth, including the water of the oceans. Water can move easily, and so the \
pull of the Moon moves it.

The pull of gravity becomes weaker with distance. The side of the Earth that faces the Moon is nearer to \
the Moon than the middle of the Earth is, and so the water on that side is pulled more strongly than the \
Earth as a whole. It is drawn a little towards the Moon, and a bulge of water forms there. The side of the \
Earth that faces away from the Moon is farther from it than the middle of the Earth is, and so the water on \
that side is pulled less strongly than the Earth as a whole. It is left a little behind, and a second bulge \
forms there. So there are two bulges, one on each side. The Earth turns around once a day, and each place \
on the coast passes through both bulges. That is why most coasts have two high tides and two low tides every \
day.

The Sun also pulls on the oceans. The Sun is much larger than the Moon, but it is also much farther away, \
and so its effect on the tides is a little less than half as strong. When the Sun, the Moon and the Earth \
stand in one line, at new moon and at full moon, the pull of the Sun and the pull of the Moon work \
together. The high tides are then very high and the low tides very low. These are called spring tides, \
although they have nothing to do with the season. When the Sun and the Moon stand at a right angle, their \
effects work against each other, and the difference between high tide and low tide is small. These are \
called neap tides.

If the Earth were covered by one deep ocean, that would be the whole story. But there are continents in \
the way, and the sea floor has mountains and valleys. Water that moves into a narrow bay is pressed \
together and rises higher. In the Bay of Fundy in Canada the sea can rise by sixteen metres between low \
tide and high tide, as high as a house with five floors. In the Mediterranean Sea, which is almost closed, \
the tide is often so small that visitors do not notice it at all.

Tides are useful. Ships with a deep hull enter some harbours only at high tide, when the water is deep \
enough. Birds come to the beach at low tide and eat the worms and shells that they find in the mud. In \
some places the moving water drives machines that make electricity: the water flows in through a dam when \
the tide rises, and out again when it falls, and each time it turns a wheel. Unlike the wind, the tides can \
be predicted for many years ahead, because the paths of the Moon and the Sun are known so well.

The tides also change the Earth and the Moon themselves, very slowly. The moving water rubs against the sea \
floor, and this makes the Earth turn a little more slowly. Our days become longer, by about two thousandths \
of a second in a hundred years. At the same time the Moon moves away from us, by almost four centimetres a \
year. Long ago, when the Earth was young, a day lasted only a few hours, the Moon looked much larger in the \
sky, and the tides were far stronger than they are today.\
"""
