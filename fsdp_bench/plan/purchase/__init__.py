"""Which servers, how many, which setting, how long, at what price.

Read in this order:
    goal.py      Goal: the model, the tokens, the deadline, the budget, and what the user leaves open
    settings.py  the settings that are tried
    simulated.py what is simulated once for all kinds of servers
    fastest.py   the fastest setting that fits on so many servers
    offer.py     Offer: one answer, with days, price and energy
    pick.py      the winner and why, the cheapest, the fastest, and those that no other beats
    searched.py  the offers of one kind of server, from few searches
    safest.py    an offer that fits even with a higher peak
    fewest.py    the fewest GPUs on which anything fits
    other_code.py  what the winner's servers cost with the same model in other code
    beyond.py    what would have to change if nothing fits
    planner.py   plan(): all offers of a goal
    call.py      plan_training(): a plan in one call from Python
    document.py  the JSON form of a plan
"""
