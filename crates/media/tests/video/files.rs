//! What is true for every format that is written.

use std::fs;
use std::path::Path;

use media::{Error, VideoFormat, VideoOptions, VideoWriter};

use super::{card, names, noise, options, read, writable, write};

fn create(path: &Path, options: &VideoOptions) -> media::Result<VideoWriter> {
    VideoWriter::create(path, VideoFormat::from_path(path)?, options)
}

#[test]
fn nothing_is_there_before_the_end_and_nothing_else_after_it() {
    for name in writable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        let mut video = create(&path, &options(32, 16)).unwrap();
        let visible = || names(folder.path()).into_iter().filter(|name| !name.starts_with(".unfinished-")).count();
        for shift in 0..3 {
            video.write(&card(32, 16, shift)).unwrap();
            assert_eq!((visible(), video.frames()), (0, shift as u64 + 1), "{name}");
        }
        assert_eq!(video.finish().unwrap(), 3);
        let expected = match name {
            "frame-%05d.png" => vec!["frame-00001.png", "frame-00002.png", "frame-00003.png"],
            name => vec![name],
        };
        assert_eq!(names(folder.path()), expected);
    }
}

#[test]
fn a_dropped_writer_leaves_nothing_and_an_older_file_stays() {
    for name in writable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        for frames in [0, 1, 5] {
            let mut video = create(&path, &options(32, 16)).unwrap();
            (0..frames).for_each(|shift| video.write(&card(32, 16, shift)).unwrap());
            drop(video);
            assert!(names(folder.path()).is_empty(), "{name} after {frames}");
        }
        if name.contains('%') {
            continue;
        }
        fs::write(&path, b"old").unwrap();
        let mut video = create(&path, &options(32, 16)).unwrap();
        video.write(&card(32, 16, 0)).unwrap();
        drop(video);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write(&path, &options(32, 16), [card(32, 16, 0)]).unwrap();
        assert!(fs::read(&path).unwrap().len() > 100, "{name}");
        assert_eq!(names(folder.path()), [name]);
    }
}

#[test]
fn a_video_without_frames_is_an_error_and_leaves_nothing() {
    for name in writable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        let error = write(&path, &options(32, 16), []).unwrap_err();
        assert_eq!(error.to_string(), format!("{}: a video without frames", path.display()));
        assert!(names(folder.path()).is_empty(), "{name}");
    }
}

#[test]
fn a_frame_of_another_size_is_refused_and_the_video_goes_on() {
    for name in writable() {
        let folder = tempfile::tempdir().unwrap();
        let mut video = create(&folder.path().join(name), &options(32, 16)).unwrap();
        video.write(&card(32, 16, 0)).unwrap();
        for (width, height) in [(32, 17), (16, 32), (1, 1)] {
            let error = video.write(&card(width, height, 0)).unwrap_err();
            let expected = format!("frame 2 has {width} x {height} pixels, expected 32 x 16 as before");
            assert_eq!(error.to_string(), expected);
        }
        video.write(&card(32, 16, 1)).unwrap();
        assert_eq!(video.finish().unwrap(), 2, "{name}");
    }
}

#[test]
fn options_out_of_range_are_errors_before_anything_is_made() {
    for name in writable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        let refused = |options: VideoOptions| {
            let error = create(&path, &options).unwrap_err();
            assert!(names(folder.path()).is_empty() && !error.to_string().contains('\n'), "{error}");
            error
        };
        assert!(matches!(refused(options(0, 16)), Error::VideoSize { .. }));
        assert!(matches!(refused(options(1 << 20, 1 << 20)), Error::VideoSize { .. }));
        let error = refused(options(32, 16).with_quality(101));
        assert_eq!(error.to_string(), "a quality of 101, expected 0 to 100");
    }
}

#[test]
fn a_missing_folder_is_found_at_once() {
    for name in writable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("no/such").join(name);
        assert!(matches!(create(&path, &options(32, 16)), Err(Error::NoFolder { .. })), "{name}");
        fs::write(folder.path().join("file"), b"x").unwrap();
        let below = folder.path().join("file").join(name);
        assert!(
            matches!(create(&below, &options(32, 16)), Err(Error::NoFolder { .. } | Error::Write { .. })),
            "{name}"
        );
    }
}

#[cfg(not(feature = "mp4"))]
#[test]
fn mp4_needs_its_feature() {
    let folder = tempfile::tempdir().unwrap();
    let error = create(&folder.path().join("clip.mp4"), &options(32, 16)).unwrap_err();
    assert_eq!(error.to_string(), "MP4 output needs the feature `mp4`, which this build is without");
    assert!(names(folder.path()).is_empty());
}

#[test]
fn writers_can_move_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<VideoWriter>();
    is_send::<media::VideoReader>();
}

/// The formats that end in one file, with a path for it.
#[cfg(target_os = "linux")]
fn to_device(device: &str) -> impl Iterator<Item = (VideoFormat, media::Result<VideoWriter>)> {
    let formats = writable().into_iter().map(|name| VideoFormat::from_path(name).unwrap());
    let single = formats.filter(|&format| format != VideoFormat::PngSequence);
    single.map(move |format| (format, VideoWriter::create(device, format, &options(64, 64))))
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_ends_the_video() {
    for (format, video) in to_device("/dev/full") {
        let mut video = video.unwrap();
        // More than the buffers hold.
        let failed = (0..400).find_map(|seed| video.write(&noise(64, 64, seed)).err());
        let error = match failed {
            Some(error) => {
                assert!(matches!(video.write(&noise(64, 64, 0)), Err(Error::GivenUp { .. })), "{format}");
                assert!(matches!(video.finish(), Err(Error::GivenUp { .. })), "{format}");
                error
            }
            // The index of an MP4 goes first, so everything is written at the end.
            None => {
                assert_eq!(format, VideoFormat::Mp4);
                video.finish().unwrap_err()
            }
        };
        let Error::Write { path, source } = &error else { panic!("{format}: {error}") };
        assert_eq!((path.as_path(), source.kind()), (Path::new("/dev/full"), std::io::ErrorKind::StorageFull));
        assert_eq!(error.to_string(), "cannot write /dev/full");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_found_with_a_short_video_too() {
    for (format, video) in to_device("/dev/full") {
        let mut video = video.unwrap();
        video.write(&card(64, 64, 0)).unwrap();
        assert!(matches!(video.finish(), Err(Error::Write { .. })), "{format}");
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_gets_the_whole_video() {
    let folder = tempfile::tempdir().unwrap();
    for name in writable().into_iter().filter(|name| !name.contains('%')) {
        let pipe = folder.path().join(format!("pipe-{name}"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        let frames = || (0..20).map(|seed| noise(32, 16, seed));
        write(&pipe, &options(32, 16), frames()).unwrap();
        let file = folder.path().join(name);
        write(&file, &options(32, 16), frames()).unwrap();
        assert_eq!(reader.join().unwrap(), fs::read(&file).unwrap(), "{name}");
    }
}

#[test]
fn the_same_frames_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    for name in writable().into_iter().filter(|name| !name.contains('%')) {
        let bytes = |prefix: &str| {
            let path = folder.path().join(format!("{prefix}-{name}"));
            write(&path, &options(40, 24), (0..10).map(|seed| noise(40, 24, seed))).unwrap();
            fs::read(path).unwrap()
        };
        assert!(bytes("a") == bytes("b"), "{name}");
    }
}

#[test]
fn lossless_formats_give_every_frame_back() {
    let folder = tempfile::tempdir().unwrap();
    let frames: Vec<_> = (0..9).map(|seed| noise(33, 17, seed)).collect();
    let path = folder.path().join("%d.png");
    assert_eq!(write(&path, &options(33, 17), frames.clone()).unwrap(), 9);
    assert!(read(&path).unwrap() == frames);
    assert!(read(folder.path()).unwrap() == frames);
}

#[test]
fn an_older_series_is_not_mixed_with_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("frame-%03d.png");
    write(&path, &options(16, 16), (0..3).map(|shift| card(16, 16, shift))).unwrap();
    let error = create(&path, &options(16, 16)).unwrap_err();
    let expected = format!(
        "cannot write {}: frame-001.png exists already, expected a folder without pictures of this name",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
    // Another name is no matter.
    write(&folder.path().join("b-%03d.png"), &options(16, 16), [card(16, 16, 0)]).unwrap();
    assert_eq!(names(folder.path()).len(), 4);

    // One that appears meanwhile.
    let path = folder.path().join("c-%d.png");
    let mut video = create(&path, &options(16, 16)).unwrap();
    video.write(&card(16, 16, 0)).unwrap();
    fs::write(folder.path().join("c-7.png"), b"x").unwrap();
    assert!(matches!(video.finish(), Err(Error::SequenceExists { .. })));
    assert_eq!(names(folder.path()).iter().filter(|name| name.starts_with("c-")).count(), 1);
    assert_eq!(names(folder.path()).len(), 5);
}
