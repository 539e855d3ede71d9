"""Program: the address of a service whose replicas come and go.

The gateway passes each request to one replica. It weights versions, counts requests in flight, keeps
requests while no replica accepts any, and lets replicas end without losing a request.

The parts, from the bottom: `jobs/routing_table.py` (which replicas exist), `routing.py` (which of them gets
a request), `buffer.py` (requests without a replica), `heads.py` (heads of messages) and `endpoints.py`
(Kubernetes' view of replicas) are pure. `exchange.py` is one request and its response. `http1_client.py` and
`http1_replica.py` are the two sides of HTTP/1.1, `http2_client.py` and `http2_replica.py` those of HTTP/2.
`dispatcher.py` brings them together. `table_file.py` and `endpoint_source.py` follow the replicas, and
`main.py` wires the program.

llhttp (httptools) parses HTTP/1.1, and asyncio's protocols pass on bodies as they come. One core thus
serves three times as many requests as with aiohttp or h11 on both sides. HTTP/2 without TLS (prior
knowledge, as gRPC uses it inside a cluster) is understood by h2 on both sides, so each call gets a replica
of its own.

Passing on the bytes of a connection would cost less. But a gRPC client has one connection: all its calls
would go to one replica, whatever the weights, and none could be counted. docs/measurements/serving.md has
the figures.
"""
