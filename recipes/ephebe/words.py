"""Words that the corpus is made of."""

NOUNS = """
apples bags balls baskets beads bells belts boats bolts books boots bottles bowls boxes bricks brooms brushes
buckets buttons candles caps cards chairs clocks coats coins combs cups desks dishes doors drums eggs envelopes
files flags forks frames gloves hammers hats hooks jars kettles keys kites knives ladders lamps lemons locks
magnets maps marbles masks mats mirrors mugs nails needles nets onions paddles pans pears pencils pens pillows
pins pipes plates plugs pots radios ribbons rings robes ropes rulers sacks saddles scarves screws shells shirts
shoes shovels skates socks spades sponges spoons stamps stones stools straps tables tents tickets tiles towels
toys trays tubes umbrellas vases watches wheels whistles wires
""".split()

NAMES = """
Ada Alan Amara Anna Ben Bruno Carla Chen Clara Dana David Elena Emil Eva Farid Felix Gita Grace Hana Hugo Ida
Ines Ivan Jana Jonas Kai Kira Lea Leo Lina Luca Mara Max Mia Mina Nadia Nils Nina Noah Nora Omar Otto Pablo
Paula Pia Rosa Ruth Sami Sara Sofia Tara Theo Tim Tom Uma Vera Viktor Yara Yuki Zoe
""".split()

COLOURS = """
red blue green yellow black white brown grey orange purple pink golden silver
""".split()

PLACES = """
office kitchen garden cellar attic garage library market harbour station school workshop bakery museum theatre
hall tower bridge farm hotel
""".split()

THINGS = """
report message letter note ticket order invoice plan list photo file draft poem recipe song story summary review
test page
""".split()

VERBS = """
open read send find delete move copy book check close share start stop print save show
""".split()

TOPICS = """
email mail issue calendar room hotel post comment user task file order item weather score price city team event
contact repo label branch branch_name key value account song photo
""".split()

FIELDS = """
name title user email date time city room subject body text id key value path label number amount query topic
author status limit day
""".split()

DAYS = """
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""".split()
