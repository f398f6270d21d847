from hypothesis import settings

# A deadline an example measures the machine, not the code, when other work shares the cores.
settings.register_profile("plan", deadline=None)
settings.load_profile("plan")
