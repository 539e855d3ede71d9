"""Karpenter as hands: it launches and ends what NodeClaims say, and decides nothing."""
