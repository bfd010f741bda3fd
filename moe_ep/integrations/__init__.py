"""How do models of other libraries reach their experts through moe_ep?"""
