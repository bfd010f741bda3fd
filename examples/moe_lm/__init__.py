"""The parts of train_moe_lm.py."""
