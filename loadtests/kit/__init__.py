"""What the scenarios share. A request goes: users -> pump -> (another process) driver -> back to users -> session.

`pump` is the greenlets' side and `driver` the process in which messages are received, so that locust's gevent and
gRPC never meet: neither can hang the other, and what gevent does costs no message its time.
"""
