"""
Seeded text.

Text depends on the seed alone. Each round can therefore have new text that no cache has
seen, and all targets get the same. A seed becomes text first, because Random(-1) would draw
what Random(1) draws.
"""

from __future__ import annotations

from random import Random

WORDS = tuple(
    """
    about above across action afternoon again against agreement almost already although
    animal another answer apartment apple architecture around arrive autumn balance bakery
    battery beautiful because before begin behind believe better between bicycle biscuit
    blanket bottle bread bridge bright bring brother build butterfly calendar candle carry
    castle cathedral caution centre certain chance change chapter chimney circle city clear
    cloud coffee colour common compass complete copper corner cottage country courage
    cousin cover cupboard curious dark daughter decide deep different dinner direction
    distance doctor door dragonfly dream early earth easy effort eleven empty engine enough
    evening every example explain family farther feather festival field figure finish fire
    floor flower follow forest forget fountain friend garden gather gentle glass goblet
    grandfather grass great green ground hammer happen harbour harvest heart heavy hedgehog
    history holiday honey hope horizon horse hour house hundred idea imagine important
    instead iron island journey kettle keyboard kingdom kitchen ladder lantern large later
    laughter learn leather lemon letter library light listen little longer machine many
    marble market meadow measure meeting memory message middle minute mirror moment money
    monastery morning mountain museum music narrow nature needle neighbour never night
    notebook nothing number ocean office orchard order other outside paper parcel patient
    pebble pencil people perhaps picture piece pigeon pilgrim place planet pleasant pocket
    porridge postman potato power present problem promise puddle quarter question quickly
    quiet rabbit railway rather reason remember result return river road rooster round
    saddle sailor sandwich school season second sentence shadow sharp shelter should shoulder
    silver simple sister sleeve slowly small snowflake soldier something sparrow spring
    station steady stone story straight strange street strong student summer surprise
    swallow table teacher teapot thought thousand thunder ticket timber together tomorrow
    towards tower travel treasure trouble trumpet turnip twelve umbrella under until useful
    valley velvet village violin visitor voice wagon walnut warm water weather whisper
    whistle white window winter wisdom without wonder wooden world yellow yesterday young
    almond apricot badger bagpipe beetroot birdhouse blackberry blueberry bluebell bobbin
    bonfire bookshelf brambles breadcrumb broomstick buttercup buttermilk cartwheel cauldron
    caterpillar chaffinch chestnut clockwork cobblestone cockerel corkscrew cowbell crumpet
    cucumber daffodil daydream doorbell dormouse doughnut drawbridge driftwood drizzle
    dumpling earthworm elderberry farmyard fiddler fireplace fishmonger flagpole flowerpot
    foghorn gingerbread goldfinch gooseberry grasshopper greengrocer hailstone haystack
    hazelnut hillside honeycomb hopscotch icicle jigsaw kingfisher ladybird lampshade
    lighthouse lollipop magpie marigold marmalade milkmaid millstone moonlight mulberry
    mushroom nightingale nutmeg oatmeal otter paintbrush pancake parsnip peppermint
    pinecone playground ploughman quilted raindrop raspberry rhubarb rowboat sandcastle
    sawdust scarecrow seagull seashell shoelace skylark sleigh snowdrop spindle starling
    sunflower tadpole teacup thimble thistle toadstool tortoise treacle tugboat wardrobe
    waterwheel weathercock wheelbarrow willow windmill woodpecker workbench wren
    """.split()  # noqa: SIM905
)


def generator(*seed: object) -> Random:
    """Random numbers that depend on all of *seed*."""
    return Random(repr(seed))  # noqa: S311


def text(rng: Random, n_words: int) -> str:
    """*n_words* common English words; about 1.3 tokens each."""
    return " ".join(rng.choices(WORDS, k=n_words))
