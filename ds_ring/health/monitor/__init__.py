"""Run the monitor process: it hears every rank's heartbeat and says who failed first.

Standard library only: the process is started by this folder's path (`__main__.py`), without torch and without
the packages that are installed, so that it is there in milliseconds. `server.py` has its sockets,
`failure_detector.py` the decision, `waits.py` who waits for whom, `handshake.py` who may speak to it.
"""
