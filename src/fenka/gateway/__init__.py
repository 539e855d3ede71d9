"""Program: the address of a service whose replicas come and go. It passes each request to one replica.

Envoy passes on the bytes of HTTP/1.1 and HTTP/2. This program writes its configuration, keeps the port while
Envoy is replaced, and answers for the requests that wait for a replica. docs/measurements/figures.md#serving
has the figures.
"""
