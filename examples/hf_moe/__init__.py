"""The parts of hf_moe_inference.py."""
