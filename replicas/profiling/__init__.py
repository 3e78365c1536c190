"""`motley profile`: where a step's time goes, module by module, and which module is off."""
