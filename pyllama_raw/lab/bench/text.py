"""A text to take words from and compare perplexities by: stories, facts, code."""

TEXT = """\
The harbour was still dark when Anna carried the last crate down to the boat. Her brother
had promised to help, but he was asleep, as he always was when something heavy had to be
moved. She did not mind. The air smelled of salt and diesel, and the first gulls were
already quarrelling over the nets. By the time the sun came up behind the island, she was
far out, and the town was only a thin line of roofs between the water and the hills.

"You could have waited for me," he said when she came back in the afternoon.

"I waited for an hour," she said. "The fish did not."

Bread needs only four things: flour, water, salt and time. Mix five hundred grams of flour
with three hundred and fifty grams of warm water, ten grams of salt and a little yeast.
Fold the dough every half hour for three hours, shape it, and let it rest overnight in a
cold place. In the morning, heat the oven as far as it will go. Bake the loaf for forty
minutes; it is done when it sounds hollow if you knock on it from below.

Rivers shape the land in two ways. Where the water is fast it takes stones and sand away,
and where it is slow it puts them down again. A bend grows because the outer bank is eaten
by the current while mud collects on the inner one. After some hundred years the bend is
so wide that the river breaks through its neck in a flood, and a lake in the form of a
half moon stays behind. The water of the Earth is always on its way: it rises from the
sea, falls on the mountains as rain or snow, and comes back in the rivers.

A computer stores a number as a row of bits. With eight bits it can tell 256 values
apart, with sixteen 65,536, and every further bit doubles the count. Fractions are harder.
One tenth has no end when it is written in base two, so a machine keeps the nearest value
it has, and a sum of ten tenths may differ from one in its last digit. For this reason
one never asks whether two such sums are equal, but whether they are close.

def mean(values):
    \"\"\"Return the arithmetic mean of a list of numbers.\"\"\"
    if not values:
        raise ValueError("the mean of nothing is not defined")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

The meeting begins at nine o'clock on Tuesday in the large room on the second floor. Please
send your questions to Mr. Keller before Friday. The agenda has three points: the budget
for next year, the new building, and the date of the summer party. Coffee and tea will be
served at ten. If you cannot come, let us know, so that we can send you the minutes.

Once upon a time there was a king who wanted to know how large his land was. He sent out
three riders, one to the north, one to the east and one to the south. The first came back
after a year and said that he had found only snow. The second came back after two years
and said that the road had no end. The third never came back, but every spring a bird sat
at the king's window and sang a song that nobody in the castle had ever heard before.
"""
