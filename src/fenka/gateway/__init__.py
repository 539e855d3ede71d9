"""Program: the address of a service whose replicas come and go.

The gateway passes each request to one replica. It weights versions, counts requests in flight, keeps requests
while no replica accepts any, and lets replicas end without losing a request.

The parts, from the bottom: `table.py` (which replicas exist), `routing.py` (which of them gets a request),
`buffer.py` (requests without a replica) and `heads.py` (heads of messages) are pure. `exchange.py` is one
request and its response. `replica_connection.py`, `dispatcher.py` and `client_connection.py` do the I/O of
HTTP/1.1. `table_file.py` follows the routing table, and `main.py` wires the program.

llhttp (httptools) parses HTTP/1.1, and asyncio's protocols pass on bodies as they come. One core thus serves
three times as many requests as with aiohttp or h11 on both sides (docs/measurements/serving.md).
"""
