// Tiles: a few rows times some panels of weights, see `multiply.isa.h` and `multiply_amx.isa.h`.

using V = F<kWidth>;

// Most rows and most panels of a tile.
constexpr int kTileRows = ASYNCMOE_LEVEL == 4 ? 32 : ASYNCMOE_LEVEL > 0 ? 6 : 3;
constexpr int kTilePanels = 8;

// The rows of a tile, which `prepare_rows` made for these weights, as `multiply` reads them: a
// thread has one at a time.
#if ASYNCMOE_LEVEL == 4
class RowTile {
   public:
    RowTile(const void* const* rows, int count, const Packed& weight);
    ~RowTile();
    RowTile(const RowTile&) = delete;
    RowTile& operator=(const RowTile&) = delete;

    int first, second;  // rows in one register and in another
    const char* laid;   // the rows as registers take them, or a row alone as it is
};
#else
struct RowTile {
    const void* const* rows;
    int count;

    RowTile(const void* const* rows, int count, const Packed&) : rows(rows), count(count) {}
};
#endif

// The rows times `panels` panels that begin at `w` -> out [panels][kTileRows][16], unscaled.
void multiply(const RowTile& tile, const Packed& weight, const char* w, int panels, float* out);

// Rows of the next tile when `rows` are left: as even as possible, since a tile of one row costs
// nearly what one of two does.
ASYNCMOE_INLINE int tile_rows(int64_t rows) {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    return (int)((rows + tiles - 1) / tiles);
}
