"""The monitor process: it receives every rank's heartbeat and decides which rank failed first.

Standard library only: the process is started by this folder's path (`__main__.py`), without torch and without
the packages that are installed, so that it is there in milliseconds. `server.py` has its sockets,
`verdicts.py` the waits between ranks and the decision, `handshake.py` the authentication, `wire.py` the part
that ranks import.

[Note: why a process]
A rank does not learn in time that another rank is gone: gloo does not report a peer that is stopped, or that
is killed in the middle of a large message, and a collective waits for half an hour. So rank 0 starts a
process (30 ms) that outlives all ranks and to which every rank keeps a connection. The end of a connection is
a death. Silence for `heartbeat_timeout_seconds` is a stop or a cut. A rank reports an exception in a pass. A
late rank is found by following who waits for whom. The first fault wins, and every survivor names the same
culprit.
"""
