"""What results of growths say of adapters."""
