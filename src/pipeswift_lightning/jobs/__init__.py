"""One job of a Hydra application: from its configuration to its result, leaving nothing behind."""
