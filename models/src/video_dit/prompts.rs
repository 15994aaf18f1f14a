use std::ops::Range;

use burn_sp::attention::{Mask, MaskRule, Tile};

use super::{FrameBlocks, VideoGrid};

/// Who attends which tokens of a text that holds a prompt of each block, one after another: a token of the video that of
/// its own block.
#[derive(Debug)]
struct BlockPrompts {
    blocks: FrameBlocks,
    grid: VideoGrid,
    /// Text tokens of a prompt.
    len: usize,
}

/// The mask of attention to a text of so many prompts: all of it if there is one for the clip.
///
/// # Panics
/// If there is not the same number of tokens in each block's prompt.
pub(super) fn text_mask(prompts: Option<FrameBlocks>, grid: &VideoGrid, text_tokens: usize) -> Mask {
    let Some(blocks) = prompts else {
        return Mask::Full;
    };
    let count = blocks.count(grid.frames);
    assert!(
        text_tokens.is_multiple_of(count.max(1)),
        "video dit: {text_tokens} text tokens are not {count} prompts of equal length, one a block"
    );
    Mask::custom(BlockPrompts {
        blocks,
        grid: *grid,
        len: text_tokens / count.max(1),
    })
}

impl BlockPrompts {
    /// The text tokens that a token of the video attends.
    fn seen(&self, query: usize) -> Range<usize> {
        let [frame, ..] = self.grid.locate(query);
        let block = self.blocks.block_of(frame);
        block * self.len..(block + 1) * self.len
    }
}

impl MaskRule for BlockPrompts {
    fn visible(&self, query: usize, key: usize) -> bool {
        self.seen(query).contains(&key)
    }

    fn tile(&self, queries: &Range<usize>, keys: &Range<usize>) -> Tile {
        let last = queries.end - 1;
        if queries.start / self.grid.tokens() != last / self.grid.tokens() {
            // Clean tokens and noisy ones: blocks start again.
            return Tile::Mixed;
        }
        let [first, last] = [queries.start, last].map(|query| self.seen(query));
        if first == last && first.start <= keys.start && keys.end <= first.end {
            return Tile::Full;
        }
        match first.start < keys.end && keys.start < last.end {
            true => Tile::Mixed,
            false => Tile::Empty,
        }
    }

    fn next_run(&self, query: usize, keys: Range<usize>) -> Range<usize> {
        let seen = self.seen(query);
        let start = seen.start.clamp(keys.start, keys.end);
        start..seen.end.clamp(start, keys.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 5 frames of 2 tokens, the first a block of its own, then blocks of 2; 3 text tokens a prompt; the video twice.
    #[test]
    fn every_token_attends_its_own_blocks_prompt() {
        let grid = VideoGrid {
            frames: 5,
            rows: 1,
            columns: 2,
        };
        let blocks = FrameBlocks::new(2).with_image_first();
        let mask = text_mask(Some(blocks), &grid, 9);
        let block_of = [0, 0, 1, 1, 1, 1, 2, 2, 2, 2];
        for query in 0..20 {
            for key in 0..9 {
                let seen = key / 3 == block_of[query % 10];
                assert_eq!(mask.visible(query, key), seen, "{query}, {key}");
                let run = mask.next_run(query, key..9);
                assert_eq!(
                    run.clone().any(|key| key / 3 == block_of[query % 10]),
                    key / 3 <= block_of[query % 10]
                );
                for (queries, keys) in [
                    (query..20, key..9),
                    (query..query + 1, key..key + 1),
                    (0..query + 1, 0..key + 1),
                ] {
                    let pairs = queries
                        .clone()
                        .flat_map(|query| keys.clone().map(move |key| (query, key)));
                    let visible: Vec<bool> = pairs.map(|(query, key)| mask.visible(query, key)).collect();
                    match mask.tile(&queries, &keys) {
                        Tile::Empty => assert!(visible.iter().all(|visible| !visible)),
                        Tile::Full => assert!(visible.iter().all(|visible| *visible)),
                        Tile::Mixed => {}
                    }
                }
            }
        }
        assert_eq!(mask.tile(&(2..6), &(3..6)), Tile::Full);
        assert_eq!(mask.tile(&(2..6), &(6..9)), Tile::Empty);
        assert_eq!(text_mask(None, &grid, 9), Mask::Full);
    }
}
