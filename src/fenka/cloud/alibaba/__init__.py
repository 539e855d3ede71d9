"""The provider `ess`: Alibaba Cloud's Auto Scaling and compute service."""
