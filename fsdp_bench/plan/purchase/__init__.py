"""Finds servers, their number and a setting, and says how long training takes and what it costs.

Read in this order:
    goal.py      Goal: the model, the tokens, the deadline, the budget; and the settings that it leaves open
    simulated.py what is simulated once for all kinds of servers
    fastest.py   the fastest setting that fits on so many servers
    offer.py     Offer: one answer, with days, price and energy
    searched.py  the offers of one kind of server, from few searches
    pick.py      the winner and why, the cheapest, the fastest, those that no other beats; other code, a higher peak
    beyond.py    the fewest GPUs on which anything fits, and what would have to change if nothing does
    planner.py   plan(): all offers of a goal; plan_training(): the same in one call from Python
    document.py  the JSON form of a plan
"""
