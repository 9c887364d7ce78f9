"""Run the monitor process: it hears every rank's heartbeat and says who failed first.

Standard library only: the process is started by this folder's path (`__main__.py`), without torch and without
the packages that are installed, so that it is there in milliseconds. `server.py` has its sockets,
`verdicts.py` who waits for whom and the decision, `handshake.py` who may speak to it, `wire.py` what ranks
need of it.

[Note: why a process]
Nothing tells a rank in time that another rank is gone: gloo is silent about a peer that is stopped, or that
is killed in the middle of a large message, and a collective waits for half an hour. So rank 0 starts a
process (30 ms) that outlives all ranks and to which every rank keeps a connection. The end of a connection is
a death. Silence for `heartbeat_timeout_seconds` is a stop or a cut. A rank reports an exception in a pass. A
late rank is found by following who waits for whom. The first fault wins, and every survivor names the same
culprit.
"""
