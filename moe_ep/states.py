"""Where in a round is a communication?

idle -> dispatched -> idle -> ..., and in a backward idle -> in_backward -> idle. Broken and
destroyed are final. Strings, which dynamo can guard on.
"""

IDLE = "idle"
DISPATCHED = "dispatched"
IN_BACKWARD = "in_backward"
BROKEN = "broken"
DESTROYED = "destroyed"
