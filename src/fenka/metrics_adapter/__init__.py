"""Program: serves figures of services to autoscalers, as the API external.metrics.k8s.io.

Everything that pods answer is written by tenants. A pod costs a bounded number of bytes, samples and seconds,
and each namespace has a number of connections of its own. A value is exact or an error. An autoscaler keeps
the number of replicas after an error; a number that is too low would end replicas that are needed.

The program keeps no state. It lists the pods for each value, so it needs neither a watch nor memory for all
pods of a cluster.
"""
