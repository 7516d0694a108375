"""What measures and shows the library; it imports the library, never the other way round.

cli, options   the command ``dfw``, and the options its commands share
problems       families of problems by size and seed, and their exact answers
baselines      layers of others, written here after their papers
systems        this library, the baselines and every rival, behind one signature
report         what every report is made of: text, figures, HTML, the machine, a progress bar
bench          ``dfw bench``: every system on the same problems
reproduce      ``dfw reproduce``: the paper's experiments, and what they leave out
demo           ``dfw demo``
export         ``dfw export``: deployed layers as files, checked
robotics       ``dfw robotics``: experts with a power limit, and policies that imitate them
fuzz           ``dfw fuzz``, or ``python -m dfwlayer_bench.fuzz`` with torch and numpy alone
"""
