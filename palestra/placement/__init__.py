"""Processes on this machine and on the nodes of a Ray cluster: started, followed, ended. What they are for is known to
those who start them: a gym's servers, engine workers.

Ray places and watches. Nothing else goes through it: no tensors, no requests, no objects of ours.
"""
