"""`motley profile`: where a step's time goes, module by module, and which module is slow, why.

May import engine and all below it. A new cause goes into slow_causes.py, a new view of a profile into report/.
"""
