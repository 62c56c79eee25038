"""For nodes of tests that wait for the SuperLink to notice that a node has died: a shorter heartbeat.

A node tells the SuperLink how often it will send one; 10 s is the shortest interval that the SuperLink accepts. It
takes a node for dead after twice that interval: within 20 s of its death, instead of within 60 s.
"""

from flwr.common import constant

constant.HEARTBEAT_DEFAULT_INTERVAL = 10
