"""Planning: from measured costs to a schedule that is proved to finish, without torch.

One artefact a step: costs -> partition -> micro-batches -> schedule -> timeline. Everything here is
deterministic, so every rank computes the same plan from the same inputs. Import the modules by
name (``pipeswift_lightning.plan.planner``); the package itself re-exports nothing.
"""
